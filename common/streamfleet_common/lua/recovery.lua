-- How a request goes back: to its lane, to wait for its next try, to run alone, or to its end.
-- Made only when it is needed: what most calls do without would cost them as much as all the rest.
local function recovery()

local MAX_SOLO = 2 -- so many workers lost while they ran nothing else convict a request
local COMPANY = 2 -- from so many lost workers on it runs alone
local FAILURES = 3 -- tries in all after retryable failures, where the request says nothing
local MAX_DEAD = 10000
local MAX_BACKOFF_MS = 3600000
local MAX_SUB_LANES = 64
local MAX_TOLD = 64 -- so many ids of lost requests one call tells, for logs

local function place_at(code, eid)
  if #code == 1 then return code .. eid end
  return code .. '.' .. eid
end

-- How many sub-lanes of each lane may hold something: as many as are in use, or were, until those are empty.
local function sub_lanes()
  local found = call('HMGET', T .. ':control', 'sub_lanes', 'sub_lanes_top')
  local most = math.floor(math.max(tonumber(found[1]) or 1, tonumber(found[2]) or 1))
  return math.max(1, math.min(MAX_SUB_LANES, most))
end

-- The codes of all streams of work.
local function all_codes(top)
  local codes = {'h', 'n', 'b', 'H', 'N', 'B', 'S'}
  for i = 1, top - 1 do
    for _, letter in ipairs({'h', 'n', 'b'}) do codes[#codes + 1] = letter .. i end
  end
  return codes
end

-- attempts, backoff, r or f
local function policy_fields(meta)
  local attempts, backoff, restart = match(meta, '^%d+|%a|[s-]|%d+|(%d+)%.(%d+)%.(%a)|')
  return tonumber(attempts), tonumber(backoff), restart
end

-- rid and payload of an entry; nil if it is there no more
local function entry_fields(code, eid)
  local found = redis.pcall('XRANGE', T .. STREAMS[code], eid, eid)
  if found.err or not found[1] then return nil end
  local values = found[1][2]
  local rid, payload = '', ''
  for i = 1, #values, 2 do
    if values[i] == 'r' then rid = values[i + 1] elseif values[i] == 'p' then payload = values[i + 1] end
  end
  return rid, payload
end

local function bury(rid, why, more)
  call('XADD', T .. ':dead', 'MAXLEN', '~', MAX_DEAD, '*', 'rid', rid, 'why', why, unpack(more))
end

-- Where a request waits next: alone if it is suspected, else before the newcomers of its lane.
local function waiting_letter(lane, crashes)
  if tonumber(crashes) >= COMPANY then return 'S' end
  return string.upper(lane)
end

-- A new entry, a new epoch, no owner. `place` is the old one.
local function enqueue(rid, deadline, epoch, place, started, attempts, crashes, solo, meta, payload)
  local letter = waiting_letter(match(meta, '^%d+|(%a)|'), crashes)
  local eid = call('XADD', T .. STREAMS[letter], '*', 'r', rid, 'p', payload)
  call('SET', T .. ':r:' .. rid, 'Q' .. deadline .. '|' .. string.format('%.0f', epoch + 1) .. '|' .. letter
    .. eid .. '||' .. started .. '|' .. attempts .. '|' .. crashes .. '|' .. solo .. '|' .. meta)
  leave(place, rid)
end

-- What becomes of a request that its worker gives back or has lost. `pause` is how many ms it waits before it
-- is tried again: false for none, true for the backoff of its own policy.
-- `limit` is how often it may be started, 0 for any number. `why` is its end event when that is reached.
local function again(rid, record, crashes, solo, limit, pause, why, now)
  local deadline, epoch, place, owner, started, attempts, _, _, meta = open_fields(record)
  local _, payload = entry_fields(split(place))
  if not payload then return 'unfound' end
  local most, backoff, restart = policy_fields(meta)
  if most > 0 then limit = most end
  local shown = false
  if restart == 'f' then
    local last = call('XREVRANGE', T .. ':ev:' .. rid, '+', '-', 'COUNT', 1)[1]
    shown = last and sub(last[1], -2) ~= '-0'
  end
  if shown or (limit > 0 and tonumber(attempts) >= limit) then
    terminal(rid, record, 'F', why, now)
    return 'ended'
  end
  if owner ~= '' then ended.running = ended.running + (match(meta, '|(%d+)|[^|]*|[^|]*$') or 0) end
  if pause == true then pause = backoff * 2 ^ math.min(attempts - 1, 30) end
  if pause and pause > 0 then
    pause = math.min(pause, MAX_BACKOFF_MS)
    call('SET', T .. ':r:' .. rid, 'Q' .. deadline .. '|' .. string.format('%.0f', epoch + 1) .. '|||' .. started
      .. '|' .. attempts .. '|' .. crashes .. '|' .. solo .. '|' .. meta .. '\n' .. payload)
    call('ZADD', T .. ':later', string.format('%.0f', now + pause), rid)
    leave(place, rid)
  else
    enqueue(rid, deadline, epoch, place, started, attempts, crashes, solo, meta, payload)
  end
  return 'again'
end

-- Put back what has waited long enough for its next try.
local function wake(now, count)
  local due = call('ZRANGEBYSCORE', T .. ':later', '-inf', now, 'LIMIT', 0, count)
  if #due == 0 then return end
  local known = records(due)
  for i, rid in ipairs(due) do
    local record = known[i]
    local deadline, epoch, place, owner, started, attempts, crashes, solo, meta
    if record then deadline, epoch, place, owner, started, attempts, crashes, solo, meta = open_fields(record) end
    if deadline and place == '' then
      local head, payload = match(meta, '^([^\n]*)\n(.*)$')
      enqueue(rid, deadline, epoch, '', started, attempts, crashes, solo, head, payload)
    else
      ended.later[#ended.later + 1] = rid
    end
  end
end

-- Count what became of a lost request, and keep its id in `counts.rids`, or `counts.buried` if it is a dead letter.
local function count(counts, what, rid)
  counts[what] = (counts[what] or 0) + 1
  local told = (what == 'dead' or what == 'stray') and counts.buried or counts.rids
  if #told < MAX_TOLD and #rid == 34 and match(rid, '^%x+$') then told[#told + 1] = rid end
end

-- Take entries of one stream from an owner who is gone. `counted`: it died with them, and they may be why.
-- `events`: the end events of a request without payload, one that may not be tried again, and a dead one.
-- Counts into `counts`: requeued, failed, dead, stray.
local function recover(code, eids, counted, events, keep_payload, now, counts)
  for _, eid in ipairs(eids) do
    local rid, payload = entry_fields(code, eid)
    local record = rid and rid ~= '' and records({rid})[1]
    if not rid then
      -- Trimmed away under its reader. Its record, if one is still open, is found by the audit.
      redis.pcall('XACK', T .. STREAMS[code], 'w', eid)
    elseif not record then
      bury(rid, 'no record of this request', {'stream', sub(STREAMS[code], 4), 'entry', eid})
      leave(place_at(code, eid), rid)
      count(counts, 'stray', rid)
    else
      local deadline, epoch, place, owner, started, attempts, crashes, solo, meta = open_fields(record)
      if place ~= place_at(code, eid) then
        leave(place_at(code, eid), rid)
      elseif owner == '' then
        -- Given out, but never begun: nobody died of it.
        enqueue(rid, deadline, epoch, place, started, attempts, crashes, solo, meta, payload)
        count(counts, 'requeued', rid)
      else
        if counted then
          crashes = string.format('%.0f', crashes + 1)
          if code == 'S' then solo = string.format('%.0f', solo + 1) end
        end
        -- The new counts, also for an end that is written from here.
        record = 'R' .. deadline .. '|' .. epoch .. '|' .. place .. '|' .. owner .. '|' .. started .. '|' .. attempts
          .. '|' .. crashes .. '|' .. solo .. '|' .. meta
        if counted and tonumber(solo) >= MAX_SOLO then
          local accepted, lane, _, _, _, tenant = meta_fields(meta)
          local more = {'tenant', tenant, 'lane', sub(STREAMS[lane], 4), 'accepted', accepted, 'attempts', attempts,
            'crashes', crashes, 'solo', solo, 'worker', owner, 'digest', match(meta, '[^|]*$'),
            'bytes', #payload}
          if keep_payload then
            more[#more + 1] = 'payload'
            more[#more + 1] = payload
          end
          bury(rid, 'its workers died while they ran nothing else', more)
          terminal(rid, record, 'P', events[3], now)
          count(counts, 'dead', rid)
        elseif again(rid, record, crashes, solo, 0, counted, events[2], now) == 'again' then
          count(counts, 'requeued', rid)
        else
          count(counts, 'failed', rid)
        end
      end
    end
  end
end

-- The ids of entries that are pending: of one owner, or of any that was silent for `idle` ms.
local function pending(code, idle, count, owner)
  local key = T .. STREAMS[code]
  local found
  if owner then
    found = redis.pcall('XPENDING', key, 'w', '-', '+', count, owner)
  else
    found = redis.pcall('XPENDING', key, 'w', 'IDLE', idle, '-', '+', count)
  end
  local eids = {}
  if not found.err then
    for i, entry in ipairs(found) do eids[i] = entry[1] end
  end
  return eids
end

-- Forget a consumer that nothing is pending for; one check and one step, so that nothing can come between.
local function forget(code, consumer)
  local key = T .. STREAMS[code]
  local found = redis.pcall('XPENDING', key, 'w', '-', '+', 1, consumer)
  if not found.err and #found == 0 then redis.pcall('XGROUP', 'DELCONSUMER', key, 'w', consumer) end
end

return {
  again = again, wake = wake, bury = bury, recover = recover, pending = pending, forget = forget, enqueue = enqueue,
  entry_fields = entry_fields, failures = FAILURES, sub_lanes = sub_lanes, all_codes = all_codes,
  count = count,
}
end
