#!lua flags=allow-oom
-- Publish and log events of running requests, if the caller still owns them.
-- ARGV: rid, fence (`|epoch|place|owner|`), tenant, id (`epoch-seq`), event for each. Without an event the
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
      local frame = id .. ' ' .. event
      if log(rid, id, frame) then
        publish(ARGV[at + 2], rid, id, frame)
        -- `start` has set the life of the log. If it has not, since the request does not stream or the log was
        -- deleted meanwhile, nothing else would ever remove it.
        if sub(id, -2) == '-1' and call('PTTL', T .. ':ev:' .. rid) == -1 then
          local deadline, _, _, _, _, _, _, _, meta = open_fields(record)
          local _, _, _, ttl = meta_fields(meta)
          call('PEXPIRE', T .. ':ev:' .. rid, string.format('%.0f', deadline - clock() + ttl))
        end
      end
    end
  else
    replies[i] = 'fenced'
  end
end
return replies
