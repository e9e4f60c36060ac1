#!lua
-- Move waiting requests to another lane, behind those that wait there. Without flags, as `submit`: it frees nothing, so
-- a full Redis refuses it as a whole.
-- ARGV: letter of the lane that they wait in (nothing: any), letter of the one they go to, tenant (nothing: any), then
-- the rids, in their order.
-- What came back from a worker goes to what came back there; what waits for its next try comes back there.
-- Replies for each: moved, there (it waits in that lane already), elsewhere (it waits in another lane than the one
-- named), suspect (it runs alone, in no lane), running (or about to: a worker has read it), lost (it has no entry any
-- more, which the audit will find), already|STATE LETTER, or gone (no record, or another tenant's).
local COMPANY = 2 -- as in `recovery`: from so many lost workers on it runs alone
local from, to, whose = ARGV[1], ARGV[2], ARGV[3]
if not find(to, '^[hnb]$') or not find(from, '^[hnb]?$') then return redis.error_reply('ERR move: no such lane') end
local rids = {}
for at = 4, #ARGV do rids[#rids + 1] = ARGV[at] end
local sub_lanes = tonumber(call('HGET', T .. ':control', 'sub_lanes')) or 1
sub_lanes = math.max(1, math.min(64, math.floor(sub_lanes)))
local oldest

local function move(rid, record)
  local deadline, epoch, place, owner, started, attempts, crashes, solo, meta = open_fields(record)
  if not deadline then return 'gone' end -- written by hand
  local accepted, lane, rest = match(meta, '^(%d+)|(%a)(|.*)$')
  local _, _, _, _, _, tenant = meta_fields(meta)
  if whose ~= '' and tenant ~= whose then return 'gone' end
  if owner ~= '' then return 'running' end
  if tonumber(crashes) >= COMPANY then return 'suspect' end
  if lane == to then return 'there' end
  if from ~= '' and lane ~= from then return 'elsewhere' end
  local new_place = ''
  if place ~= '' then
    local code, eid = split(place)
    local key = T .. STREAMS[code]
    local found = redis.pcall('XRANGE', key, eid, eid)
    if found.err or not found[1] then return 'lost' end
    -- Whoever was given it begins it in a moment. Its end would be that of an entry that is there no more.
    local given = redis.pcall('XPENDING', key, 'w', eid, eid, 1)
    if not given.err and #given > 0 then return 'running' end
    local values, payload = found[1][2], ''
    for i = 1, #values, 2 do
      if values[i] == 'p' then payload = values[i + 1] end
    end
    local new_code = to
    if find(code, '^[HNB]') then
      new_code = string.upper(to)
    else
      local number = tonumber(sub(redis.sha1hex(tenant), 1, 8), 16) % sub_lanes
      if number > 0 then new_code = to .. number end
      if not oldest or tonumber(accepted) < oldest then oldest = tonumber(accepted) end
    end
    new_place = new_code .. (#new_code == 1 and '' or '.')
      .. call('XADD', T .. STREAMS[new_code], '*', 'r', rid, 'p', payload)
    leave(place, rid)
  end
  -- The same epoch: nobody has ever held it in this one.
  call('SET', T .. ':r:' .. rid, 'Q' .. deadline .. '|' .. epoch .. '|' .. new_place .. '||' .. started .. '|' .. attempts
    .. '|' .. crashes .. '|' .. solo .. '|' .. accepted .. '|' .. to .. rest)
  return 'moved'
end

local known = records(rids)
local replies, seen = {}, {}
for i, rid in ipairs(rids) do
  local record = known[i]
  if not record then
    replies[i] = 'gone'
  elseif seen[rid] then
    replies[i] = seen[rid] == 'moved' and 'there' or seen[rid]
  elseif sub(record, 1, 1) == 'E' then
    local is_ours = whose == '' or match(match(record, '^[^\n]*'), '|([^|]*)|[^|]*$') == whose
    replies[i] = is_ours and 'already|' .. sub(record, 2, 2) or 'gone'
  else
    replies[i] = move(rid, record)
    seen[rid] = replies[i]
  end
end
settle()
if oldest then
  local field = 'oldest:' .. sub(STREAMS[to], 4)
  local noted = tonumber(redis.pcall('HGET', T .. ':sweep', field) or 0) or 0
  if noted == 0 or oldest < noted then redis.pcall('HSET', T .. ':sweep', field, string.format('%.0f', oldest)) end
end
return replies
