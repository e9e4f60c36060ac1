#!lua flags=allow-oom
-- End running requests, if the caller still owns them.
-- ARGV: rid, fence, state letter, end event for each.
-- Replies one array a request: ok | already and the state letter | fenced | gone (no record).
local rids = {}
for at = 1, #ARGV, 4 do rids[#rids + 1] = ARGV[at] end
local now = clock()
local known = records(rids)
local replies = {}
for i, rid in ipairs(rids) do
  local at = 4 * i - 3
  local fence, record = ARGV[at + 1], known[i]
  if not record then
    replies[i] = {'gone'}
  elseif sub(record, 1, 1) == 'E' then
    replies[i] = {'already', sub(record, 2, 2)}
  elseif sub(record, 1, 1) == 'R' and sub(record, 15, 14 + #fence) == fence then
    terminal(rid, record, ARGV[at + 2], ARGV[at + 3], now)
    -- The same request twice in one batch must not end twice.
    for j = i + 1, #rids do
      if rids[j] == rid then known[j] = 'E' .. ARGV[at + 2] end
    end
    replies[i] = {'ok'}
  else
    replies[i] = {'fenced'}
  end
end
settle()
return replies
