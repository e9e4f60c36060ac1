#!lua flags=allow-oom
-- Begin deliveries that this owner has read.
-- ARGV: owner, start event, end event of an expired request, then rid, entry id, lane for each.
-- Replies one array a delivery: ok, epoch, now, accepted, deadline, attempts, crashes |
-- gone (ended, or superseded by a newer entry) | lost (another owner runs it) | expired | stray (dead letter).
local owner, start_event, expired_event = ARGV[1], ARGV[2], ARGV[3]
local now = clock()
local rids = {}
for at = 4, #ARGV, 3 do rids[#rids + 1] = ARGV[at] end
local known = records(rids)
local replies, writes, drop, seen = {}, {}, {}, {}

for i, rid in ipairs(rids) do
  local eid, lane = ARGV[3 * i + 2], ARGV[3 * i + 3]
  local record = known[i]
  -- The same entry twice in one batch gets one answer.
  local place = lane .. ' ' .. eid .. ' ' .. rid
  local earlier = seen[place]
  seen[place] = earlier or i
  local function gone()
    drop[lane] = drop[lane] or {}
    table.insert(drop[lane], eid)
  end
  if earlier then
    replies[i] = replies[earlier]
  elseif not record then
    call('XACK', T .. ':s:' .. lane, 'w', eid)
    -- A repetition of this call must not bury it twice.
    if call('XDEL', T .. ':s:' .. lane, eid) == 1 then
      call('XADD', T .. ':dead', 'MAXLEN', '~', 10000, '*', 'rid', rid, 'why', 'no record of this request',
        'lane', lane, 'entry', eid)
    end
    replies[i] = {'stray'}
  else
    local deadline, epoch, its_eid, its_owner, started, attempts, crashes, solo, meta = open_fields(record)
    if not deadline or its_eid ~= eid then
      gone()
      replies[i] = {'gone'}
    elseif its_owner ~= '' and its_owner ~= owner then
      replies[i] = {'lost'}
    elseif tonumber(deadline) <= tonumber(now) then
      terminal(rid, record, 'X', expired_event, now)
      replies[i] = {'expired'}
    else
      local accepted, _, stream, ttl, tenant = meta_fields(meta)
      if its_owner == '' then
        epoch = string.format('%.0f', epoch + 1)
        attempts = string.format('%.0f', attempts + 1)
        started = now
        writes[#writes + 1] = T .. ':r:' .. rid
        writes[#writes + 1] = 'R' .. deadline .. '|' .. epoch .. '|' .. eid .. '|' .. owner .. '|' .. started
          .. '|' .. attempts .. '|' .. crashes .. '|' .. solo .. '|' .. meta
        if stream == 's' then
          local head = epoch .. '-0,' .. accepted .. ',' .. started .. ',' .. now .. ',' .. attempts
          log(rid, epoch .. '-0', head .. ' ' .. start_event)
          call('PEXPIRE', T .. ':ev:' .. rid, string.format('%.0f', deadline - now + ttl))
          publish(tenant, rid, head, start_event)
        end
      end -- else the same owner asks again after a lost reply, and gets the same epoch
      replies[i] = {'ok', tonumber(epoch), tonumber(now), tonumber(accepted), tonumber(deadline),
        tonumber(attempts), tonumber(crashes)}
    end
  end
end
if #writes > 0 then call('MSET', unpack(writes)) end
for lane, eids in pairs(drop) do discard(lane, eids) end
settle()
return replies
