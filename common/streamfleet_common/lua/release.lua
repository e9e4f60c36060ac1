#!lua flags=allow-oom
-- Give requests back, whether begun or only read; nothing is counted against them.
-- ARGV: end event of one that may not be begun again, then rid, place, fence (`|epoch|place|owner|`, or nothing
-- for one that was only read) for each.
-- Replies ok or lost for each.
local back = recovery()
local now = clock()
local rids = {}
for at = 2, #ARGV, 3 do rids[#rids + 1] = ARGV[at] end
local known = records(rids)
local replies = {}
local done = {} -- the same request twice in one batch must not go back twice
for i, rid in ipairs(rids) do
  local place, fence, record = ARGV[3 * i], ARGV[3 * i + 1], known[i]
  local deadline, epoch, its_place, owner, started, attempts, crashes, solo, meta
  if record and not done[rid] then
    deadline, epoch, its_place, owner, started, attempts, crashes, solo, meta = open_fields(record)
  end
  replies[i] = 'lost'
  if deadline and its_place == place then
    if owner == '' then
      local _, payload = back.entry_fields(split(place))
      if payload then
        back.enqueue(rid, deadline, epoch, place, started, attempts, crashes, solo, meta, payload)
        replies[i] = 'ok'
      end
    elseif fence ~= '' and sub(record, 15, 14 + #fence) == fence then
      if back.again(rid, record, crashes, solo, 0, false, ARGV[1], now) ~= 'unfound' then replies[i] = 'ok' end
    end
    done[rid] = replies[i] == 'ok'
  end
end
settle()
return replies
