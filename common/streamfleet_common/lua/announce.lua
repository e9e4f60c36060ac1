#!lua flags=allow-oom
-- Show a worker's card for a while, set the queue's limits, and forget cards that have run out.
-- ARGV: worker, card, life of the card in ms (0: the worker leaves), max_queue_depth, max_queue_tokens (0: no
-- limit), lease in ms, 1 to keep the payload of dead letters, 1 if Redis's memory is nearly full, sub-lanes.
-- Replies now.
local now = clock()
if ARGV[3] == '0' then
  call('HDEL', T .. ':workers', ARGV[1])
  call('HDEL', T .. ':control', 'drain:' .. ARGV[1])
  local back = recovery()
  for _, code in ipairs(back.all_codes(back.sub_lanes())) do back.forget(code, ARGV[1]) end
  return tonumber(now)
end
call('HSET', T .. ':workers', ARGV[1], string.format('%.0f', now + ARGV[3]) .. '|' .. ARGV[2])
call('HSET', T .. ':control', 'max_queue_depth', ARGV[4], 'max_queue_tokens', ARGV[5], 'lease_ms', ARGV[6],
  'dead_payload', ARGV[7])
local wanted = tonumber(ARGV[9] or 1)
local top = tonumber(call('HGET', T .. ':control', 'sub_lanes_top')) or 1
if wanted > 1 or top > 1 then
  -- What waits in more of them than are wanted now must still be read, until a sweep has found them empty.
  call('HSET', T .. ':control', 'sub_lanes', ARGV[9], 'sub_lanes_top', math.max(wanted, top))
  for i = top, wanted - 1 do
    for _, letter in ipairs({'h', 'n', 'b'}) do
      redis.pcall('XGROUP', 'CREATE', T .. STREAMS[letter .. i], 'w', '0', 'MKSTREAM')
    end
  end
end
if ARGV[8] == '1' then
  call('HSET', T .. ':control', 'crowded_until', string.format('%.0f', now + ARGV[3] / 2))
end
local cards = call('HGETALL', T .. ':workers')
for i = 1, #cards, 2 do
  if tonumber(match(cards[i + 1], '^%d+') or 0) < tonumber(now) then call('HDEL', T .. ':workers', cards[i]) end
end
return tonumber(now)
