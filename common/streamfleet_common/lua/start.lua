#!lua flags=allow-oom
-- Begin deliveries: those that this owner has read, then, without waiting, up to `count` new ones. The sub-lanes of a
-- lane have their turns in rotation, over all calls of all owners: each that holds something gives as many as the others.
-- ARGV: owner, start event, end event of an expired request, count, the letters of the streams to look into in
-- this order, then rid and place for each that was read.
-- Replies whether the caller should make room (0 or 1: a suspect waits to run alone, and this owner is to take
-- it), now, how many sub-lanes are to be looked into, then four values a delivery: place, rid, payload (false for
-- one that the caller has read), and ok|epoch|accepted|deadline|attempts|crashes, or gone (ended, or superseded
-- by a newer entry), lost (another owner runs it), expired, stray (dead letter).
local owner, start_event, expired_event, count, letters = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local SUSPECT_MS = 30000 -- how long one owner is waited for to take a suspect, before another is asked
local now = clock()
local rids, places, payloads = {}, {}, {}
for at = 6, #ARGV, 2 do
  rids[#rids + 1] = ARGV[at]
  places[#places + 1] = ARGV[at + 1]
  payloads[#payloads + 1] = false
end
local top = tonumber(call('HGET', T .. ':control', 'sub_lanes_top')) or 1
if top ~= 1 then top = math.max(1, math.min(64, math.floor(top))) end -- it may be written by hand
local replies = {0, now, top}

local function new_entries(code, most)
  local key = T .. STREAMS[code]
  local length = redis.pcall('XLEN', key)
  if length == 0 then return false end -- a third of the cost of a read in vain, and most streams are empty
  local found = redis.pcall('XREADGROUP', 'GROUP', 'w', owner, 'COUNT', most, 'STREAMS', key, '>')
  if type(found) == 'table' and found.err and sub(found.err, 1, 7) == 'NOGROUP' then
    -- Flushed, or never used. From the first entry on, so that nothing that came earlier is missed.
    redis.pcall('XGROUP', 'CREATE', key, 'w', '0', 'MKSTREAM')
    found = redis.pcall('XREADGROUP', 'GROUP', 'w', owner, 'COUNT', most, 'STREAMS', key, '>')
  end
  return found
end

if count > 0 then
  if call('ZCARD', T .. ':later') > 0 then
    local back = recovery()
    back.wake(now, count)
  end
  local suspects = redis.pcall('XLEN', T .. STREAMS.S)
  if type(suspects) == 'number' and suspects > 0 and not find(letters, 'S') then
    local summary = redis.pcall('XPENDING', T .. STREAMS.S, 'w')
    if suspects > (summary.err and 0 or summary[1]) then
      local asked, until_ = match(call('HGET', T .. ':sweep', 'suspect') or '|0', '^(.*)|(%d+)$')
      if asked == owner or tonumber(until_) < tonumber(now) then
        call('HSET', T .. ':sweep', 'suspect', owner .. '|' .. string.format('%.0f', now + SUSPECT_MS))
        replies[1] = 1
        count = 0
      end
    end
  end
end
local failure

-- Take up to `most` new entries of a stream; gives how many there were.
local function take(code, most)
  local found = new_entries(code, most)
  if not found then return 0 end
  if found.err then
    failure = failure or found
    return 0
  end
  for _, entry in ipairs(found[1][2]) do
    local values = entry[2] or {}
    local rid, payload = '', ''
    for i = 1, #values, 2 do
      if values[i] == 'r' then rid = values[i + 1] elseif values[i] == 'p' then payload = values[i + 1] end
    end
    rids[#rids + 1] = rid
    places[#places + 1] = (#code == 1 and code or code .. '.') .. entry[1]
    payloads[#rids] = payload
    count = count - 1
  end
  return #found[1][2]
end

for at = 1, #letters do
  if count <= 0 then break end
  local letter = sub(letters, at, at)
  if top == 1 or not find('hnb', letter, 1, true) then
    if take(letter, letter == 'S' and 1 or count) > 0 and letter == 'S' then
      call('HDEL', T .. ':sweep', 'suspect')
      break -- a suspect runs alone
    end
  else
    -- As if one were taken from each sub-lane in turn, for as long as there is room; but with fewer calls.
    local turn = tonumber(call('HGET', T .. ':sweep', 'turn:' .. letter) or 0)
    local waiting = {}
    for i = 0, top - 1 do
      local number = (turn + i) % top
      local code = number == 0 and letter or letter .. number
      if redis.pcall('XLEN', T .. STREAMS[code]) ~= 0 then waiting[#waiting + 1] = {code = code, number = number} end
    end
    local turns, gave = waiting, {}
    while count > 0 and #waiting > 0 do
      local part = math.floor(count / #waiting)
      local more = {}
      for _, one in ipairs(waiting) do
        if count <= 0 then break end
        local most = math.max(1, part)
        local found = take(one.code, most)
        gave[one] = (gave[one] or 0) + found
        if found == most then more[#more + 1] = one end
      end
      waiting = more
    end
    -- The last turn was that of the one that gave most; of several, of the last of them.
    local last, most = nil, 1
    for _, one in ipairs(turns) do
      if (gave[one] or 0) >= most then last, most = one.number, gave[one] end
    end
    if last then call('HSET', T .. ':sweep', 'turn:' .. letter, (last + 1) % top) end
  end
end
if #rids == 0 then
  settle()
  return failure or replies
end

-- Of a queued record, in one scan: deadline, epoch, place, attempts, the rest from crashes on, and of this
-- crashes, accepted, stream, tokens.
local QUEUED = '^Q(%d+)|(%d+)|([^|]*)||%d+|(%d+)|((%d+)|%d+|(%d+)|%a|([s-])|%d+|[^|]*|(%d+)|.*)$'
local known = records(rids)
local writes, drop, seen, begun = {}, {}, {}, 0 -- the last: tokens

local function begin(rid, place, record)
  if not record then
    local code, eid = split(place)
    call('XACK', T .. STREAMS[code], 'w', eid)
    -- A repetition of this call must not bury it twice.
    if call('XDEL', T .. STREAMS[code], eid) == 1 then
      local back = recovery()
      back.bury(rid, 'no record of this request', {'stream', sub(STREAMS[code], 4), 'entry', eid})
    end
    return 'stray'
  end
  local deadline, epoch, its_place, attempts, rest, crashes, accepted, stream, tokens = match(record, QUEUED)
  local its_owner = ''
  if not deadline then
    local _, _, meta
    deadline, epoch, its_place, its_owner, _, attempts, crashes, _, meta = open_fields(record)
    accepted = meta and meta_fields(meta)
  end
  if not deadline or its_place ~= place then
    local code, eid = split(place)
    drop[code] = drop[code] or {}
    table.insert(drop[code], eid)
    return 'gone'
  elseif its_owner ~= '' and its_owner ~= owner then
    return 'lost'
  elseif tonumber(deadline) <= tonumber(now) then
    terminal(rid, record, 'X', expired_event, now)
    return 'expired'
  end
  if its_owner == '' then
    epoch = string.format('%.0f', epoch + 1)
    attempts = string.format('%.0f', attempts + 1)
    writes[#writes + 1] = T .. ':r:' .. rid
    writes[#writes + 1] = 'R' .. deadline .. '|' .. epoch .. '|' .. place .. '|' .. owner .. '|' .. now .. '|'
      .. attempts .. '|' .. rest
    begun = begun + tokens
    if stream == 's' then
      local _, _, _, ttl, _, tenant = meta_fields(match(rest, '^%d+|%d+|(.*)$'))
      local head = epoch .. '-0,' .. accepted .. ',' .. now .. ',' .. now .. ',' .. attempts
      local frame = head .. ' ' .. start_event
      log(rid, epoch .. '-0', frame)
      call('PEXPIRE', T .. ':ev:' .. rid, string.format('%.0f', deadline - now + ttl))
      publish(tenant, rid, head, frame)
    end
  end -- else the same owner asks again after a lost reply, and gets the same epoch
  return 'ok|' .. epoch .. '|' .. accepted .. '|' .. deadline .. '|' .. attempts .. '|' .. crashes
end

for i, rid in ipairs(rids) do
  local place = places[i]
  -- The same entry twice in one batch gets one answer.
  local name = place .. rid
  local outcome = seen[name]
  if not outcome then
    outcome = begin(rid, place, known[i])
    seen[name] = outcome
  end
  local payload = payloads[i]
  replies[4 * i] = payload and place
  replies[4 * i + 1] = payload and rid
  replies[4 * i + 2] = payload
  replies[4 * i + 3] = outcome
end
if #writes > 0 then call('MSET', unpack(writes)) end
if begun > 0 then redis.pcall('HINCRBY', T .. ':tenants', '*|r', begun) end
for code, eids in pairs(drop) do discard(code, eids) end
settle()
return replies
