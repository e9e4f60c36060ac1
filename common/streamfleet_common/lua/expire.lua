#!lua flags=allow-oom
-- End open requests whose deadline has passed, at most ARGV[2] of them. ARGV[1] is their end event.
-- Replies how many were ended.
local now = clock()
local rids = call('ZRANGEBYSCORE', T .. ':open', '-inf', now, 'LIMIT', 0, ARGV[2])
if #rids == 0 then return 0 end
local known = records(rids)
for i, rid in ipairs(rids) do
  local record = known[i]
  if record and sub(record, 1, 1) ~= 'E' then
    terminal(rid, record, 'X', ARGV[1], now)
  else
    ended.rids[#ended.rids + 1] = rid -- no record any more: nothing to tell anybody, but the place is free
  end
end
settle()
return #rids
