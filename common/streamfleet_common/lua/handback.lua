#!lua flags=allow-oom
-- Take from a worker that is gone all that it held, at once, and forget it.
-- ARGV: owner, 1 if it died by itself (that counts against what it ran), how many at once, then the end
-- events of a request without payload, one that may not be tried again, and a dead one.
-- Replies how many were taken (there may be more of them if it is the number asked for), the ids of the first of
-- those that were put back or have failed, and of those that are dead letters now.
local back = recovery()
local owner, counted, limit = ARGV[1], ARGV[2] == '1', tonumber(ARGV[3])
local now = clock()
local keep = call('HGET', T .. ':control', 'dead_payload') == '1'
local taken = 0
local counts = {rids = {}, buried = {}}
local codes = back.all_codes(back.sub_lanes())
for _, code in ipairs(codes) do
  local eids = back.pending(code, 0, limit - taken, owner)
  taken = taken + #eids
  back.recover(code, eids, counted, {ARGV[4], ARGV[5], ARGV[6]}, keep, now, counts)
  if taken >= limit then break end
end
settle()
if taken < limit then
  call('HDEL', T .. ':workers', owner)
  call('HDEL', T .. ':control', 'drain:' .. owner)
  for _, code in ipairs(codes) do back.forget(code, owner) end
end
return {taken, counts.rids, counts.buried}
