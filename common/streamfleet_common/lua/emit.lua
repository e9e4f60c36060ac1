#!lua flags=allow-oom
-- Publish and log events of running requests, if the caller still owns them.
-- ARGV: rid, fence (`|epoch|entry id|owner|`), tenant, id (`epoch-seq`), event for each. Without an event the
-- fence alone is checked. Replies ok or fenced for each; an event that the log already has is ok.
local rids = {}
for at = 1, #ARGV, 5 do rids[#rids + 1] = ARGV[at] end
local known = records(rids)
local replies = {}
for i, rid in ipairs(rids) do
  local at = 5 * i - 4
  local fence, id, event = ARGV[at + 1], ARGV[at + 3], ARGV[at + 4]
  local record = known[i]
  if record and sub(record, 1, 1) == 'R' and sub(record, 15, 14 + #fence) == fence then
    replies[i] = 'ok'
    if event ~= '' then
      local added = redis.pcall('XADD', T .. ':ev:' .. rid, id, 'f', id .. ' ' .. event)
      -- An id at or below the top: this is the repetition of a call whose reply was lost.
      if type(added) ~= 'table' then publish(ARGV[at + 2], rid, id, event) end
    end
  else
    replies[i] = 'fenced'
  end
end
return replies
