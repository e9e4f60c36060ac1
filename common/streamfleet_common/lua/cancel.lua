#!lua flags=allow-oom
-- Cancel open requests of a tenant, whatever their state; their owner learns it from its next emit or finish.
-- ARGV: tenant, end event, then the rids.
-- Replies for each: ok, gone (no record, or another tenant's), or already|STATE LETTER.
local tenant, event = ARGV[1], ARGV[2]
local rids = {}
for at = 3, #ARGV do rids[#rids + 1] = ARGV[at] end
local now = clock()
local known = records(rids)
local replies, seen = {}, {}
for i, rid in ipairs(rids) do
  local record = known[i]
  local head = record and match(record, '^[^\n]*')
  if not record or match(head, '|([^|]*)|[^|]*$') ~= tenant then
    replies[i] = 'gone'
  elseif sub(record, 1, 1) == 'E' then
    replies[i] = 'already|' .. sub(record, 2, 2)
  elseif seen[rid] then
    replies[i] = 'already|C'
  else
    seen[rid] = true
    terminal(rid, record, 'C', event, now)
    replies[i] = 'ok'
  end
end
settle()
return replies
