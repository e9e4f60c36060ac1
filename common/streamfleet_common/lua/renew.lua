#!lua flags=allow-oom
-- Keep the leases of running requests, if the caller still owns them. Only here an entry is claimed, so that
-- nobody can take back what was given to another meanwhile.
-- ARGV: owner, then rid and fence (`|epoch|place|owner|`) for each.
-- Replies whether the owner is asked to drain (0 or 1), then ok or lost for each.
local owner = ARGV[1]
local rids = {}
for at = 2, #ARGV, 2 do rids[#rids + 1] = ARGV[at] end
local replies = {call('HEXISTS', T .. ':control', 'drain:' .. owner)}
if #rids == 0 then return replies end
local known = records(rids)
local entries = {}
for i, rid in ipairs(rids) do
  local fence, record = ARGV[2 * i + 1], known[i]
  if record and sub(record, 1, 1) == 'R' and sub(record, 15, 14 + #fence) == fence
    and sub(fence, -#owner - 2) == '|' .. owner .. '|' then
    local code, eid = split(match(fence, '^|%d+|(%a[^|]+)|'))
    entries[code] = entries[code] or {}
    table.insert(entries[code], eid)
    replies[i + 1] = 'ok'
  else
    replies[i + 1] = 'lost'
  end
end
for code, eids in pairs(entries) do
  eids[#eids + 1] = 'JUSTID' -- without it, each renewal would count as a delivery
  -- The group may be gone; the fence holds all the same.
  redis.pcall('XCLAIM', T .. STREAMS[code], 'w', owner, 0, unpack(eids))
end
return replies
