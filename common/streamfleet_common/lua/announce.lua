#!lua flags=allow-oom
-- Show a worker's card for a while, set the queue's limit, and forget cards that have run out.
-- ARGV: worker, card, life of the card in ms (0 takes it down), max_queue_depth. Replies now.
local now = clock()
if ARGV[3] == '0' then
  call('HDEL', T .. ':workers', ARGV[1])
  return tonumber(now)
end
call('HSET', T .. ':workers', ARGV[1], string.format('%.0f', now + ARGV[3]) .. '|' .. ARGV[2])
call('HSET', T .. ':control', 'max_queue_depth', ARGV[4])
local cards = call('HGETALL', T .. ':workers')
for i = 1, #cards, 2 do
  if tonumber(match(cards[i + 1], '^%d+') or 0) < tonumber(now) then call('HDEL', T .. ':workers', cards[i]) end
end
return tonumber(now)
