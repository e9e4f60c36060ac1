#!lua flags=allow-oom
-- Everybody's housekeeping: end what is overdue, take work from owners who fell silent, look for requests
-- whose entry was lost. No lock: whoever comes first does it.
-- ARGV: lease in ms (used unless the queue's control hash sets one), how many of each kind at once, then the
-- end events: overdue, lost payload, not to be tried again, dead; then 1 to do no more than end what is overdue,
-- if somebody has looked after the rest within a third of a lease.
-- Replies numbers: overdue, requeued, failed, dead, stray, whether there may be more, grace (1: nothing was
-- taken, since nobody has swept for too long to tell a silent owner from a silent server), then how many ms the
-- oldest waiting request of each lane (high, normal, bulk) has waited, 0 if none waits;
-- then the ids of the first of those that were requeued or failed, and of those that are dead letters now.
local MAX_RECOUNT = 2000
local back = recovery()

-- An open request without a record: whose it was, and what it counted for, nobody knows.
local function vanish(rid)
  ended.rids[#ended.rids + 1] = rid
  ended.uncounted = true
end

-- What all open requests count for, from their records.
local function recount()
  local sums = {}
  local rids = call('ZRANGE', T .. ':open', 0, -1)
  for first = 1, #rids, 500 do
    for _, record in ipairs(records({unpack(rids, first, math.min(#rids, first + 499))})) do
      local meta = record and match(record, '^[QR]%d+|%d+|[^|]*|[^|]*|%d+|%d+|%d+|%d+|([^\n]*)')
      local _, _, _, _, tokens, tenant = meta_fields(meta or '')
      if tokens then
        sums[tenant] = (sums[tenant] or 0) + 1
        sums[tenant .. '|t'] = (sums[tenant .. '|t'] or 0) + tokens
        sums['*'] = (sums['*'] or 0) + tokens
        if sub(record, 1, 1) == 'R' then sums['*|r'] = (sums['*|r'] or 0) + tokens end
      end
    end
  end
  call('DEL', T .. ':tenants')
  for field, sum in pairs(sums) do
    if sum > 0 then call('HSET', T .. ':tenants', field, string.format('%.0f', sum)) end
  end
end

-- When the first request of a stream that nobody has read was accepted; it may have been moved there since.
local function oldest(code)
  local after = '-' -- nobody reads here yet
  local groups = redis.pcall('XINFO', 'GROUPS', T .. STREAMS[code])
  for _, group in ipairs(groups.err and {} or groups) do
    local values = {}
    for i = 1, #group, 2 do values[group[i]] = group[i + 1] end
    if values.name == 'w' then after = '(' .. values['last-delivered-id'] end
  end
  local found = redis.pcall('XRANGE', T .. STREAMS[code], after, '+', 'COUNT', 1)
  if found.err or not found[1] then return end
  local rid = back.entry_fields(code, found[1][1])
  local record = rid ~= '' and records({rid})[1] or ''
  local meta = match(record, '^Q%d+|%d+|[^|]*|[^|]*|%d+|%d+|%d+|%d+|([^\n]*)')
  return tonumber(meta_fields(meta or '') or match(found[1][1], '^%d+'))
end

-- Whether a stream holds nothing, and nothing of it is given out.
local function is_left(code)
  local found = redis.pcall('XPENDING', T .. STREAMS[code], 'w')
  return redis.pcall('XLEN', T .. STREAMS[code]) == 0 and (found.err ~= nil or found[1] == 0)
end

local lease = tonumber(call('HGET', T .. ':control', 'lease_ms') or ARGV[1])
local limit = tonumber(ARGV[2])
local events = {ARGV[4], ARGV[5], ARGV[6]}
local now = clock()
local at = tonumber(now)
local last, grace_until, audited, seen_at, seen_ended, ended_now, cleaned, full_at = unpack(call('HMGET',
  T .. ':sweep', 'last', 'grace_until', 'audited', 'rate_at', 'rate_ended', 'ended', 'cleaned', 'full'))
local notes = {'last', now}
local counts = {requeued = 0, failed = 0, dead = 0, stray = 0, rids = {}, buried = {}}
local more = 0

-- A pause of everybody at once ages all leases: give the owners time to come back and renew them.
if not last or at - last > lease / 2 then
  grace_until = now + lease
  notes[#notes + 1] = 'grace_until'
  notes[#notes + 1] = string.format('%.0f', grace_until)
end
call('HSET', T .. ':sweep', unpack(notes))
notes = {}

-- How fast requests end, for those who ask when there will be room.
if not seen_at or at - seen_at >= 1000 then
  local rate = seen_at and (tonumber(ended_now or 0) - seen_ended) * 1000 / (at - seen_at) or 0
  notes = {'rate_at', now, 'rate_ended', ended_now or 0, 'rate', string.format('%.3f', rate)}
end

local overdue = call('ZRANGEBYSCORE', T .. ':open', '-inf', now, 'LIMIT', 0, limit)
if #overdue > 0 then
  local known = records(overdue)
  for i, rid in ipairs(overdue) do
    local record = known[i]
    if record and sub(record, 1, 1) ~= 'E' then
      terminal(rid, record, 'X', ARGV[3], now)
    else
      vanish(rid) -- no record any more: nothing to tell anybody, but the place is free
    end
  end
  if #overdue == limit then more = 1 end
end
back.wake(now, limit)
settle()
ended = {rids = {}, entries = {}, later = {}, tenants = {}, running = 0, uncounted = false}

local grace = at < tonumber(grace_until or 0)
if ARGV[7] == '1' and at - tonumber(full_at or 0) < lease / 3 then
  return {#overdue, 0, 0, 0, 0, more, grace and 1 or 0, 0, 0, 0, {}, {}}
end
local top = back.sub_lanes()
local codes = back.all_codes(top)
if not grace then
  local keep = call('HGET', T .. ':control', 'dead_payload') == '1'
  local left = limit -- of all streams together: there may be two hundred, and one call holds everybody up
  for _, code in ipairs(codes) do
    local eids = back.pending(code, lease, left)
    back.recover(code, eids, true, events, keep, now, counts)
    left = left - #eids
    if left <= 0 then
      more = 1
      break
    end
  end
  settle()
  ended = {rids = {}, entries = {}, later = {}, tenants = {}, running = 0, uncounted = false}
end

-- The audit: a slice of the open requests at a time, against what the streams really hold.
local first, highest = tonumber(audited or 0), top
local slice = call('ZRANGE', T .. ':open', first, first + limit - 1)
if #slice > 0 and not grace then
  local known = records(slice)
  for i, rid in ipairs(slice) do
    local record = known[i]
    local deadline, epoch, place, owner, started, attempts, crashes, solo
    if record then deadline, epoch, place, owner, started, attempts, crashes, solo = open_fields(record) end
    if not deadline then
      vanish(rid)
    elseif place ~= '' and at - match(place, '(%d+)%-') > 2000 then
      local code, eid = split(place)
      highest = math.max(highest, (tonumber(sub(code, 2)) or 0) + 1)
      local card = owner ~= '' and call('HGET', T .. ':workers', owner)
      -- A live owner has the request in memory, and may still finish it.
      if not card or tonumber(match(card, '^%d+') or 0) < at then
        if not back.entry_fields(code, eid) then
          terminal(rid, record, 'F', events[1], now)
          back.count(counts, 'failed', rid)
        elseif owner ~= '' then
          -- Acknowledged by hand: the pending lists will never show it again.
          local found = redis.pcall('XPENDING', T .. STREAMS[code], 'w', eid, eid, 1)
          if not found.err and #found == 0 then
            local what = back.again(rid, record, crashes, solo, 0, false, events[2], now) == 'again' and 'requeued' or 'failed'
            back.count(counts, what, rid)
          end
        end
      end
    end
  end
end
settle()
-- A request whose record was deleted has taken along what it counted for. It is found by counting anew, once there
-- are not too many to do so at one go.
local open = call('ZCARD', T .. ':open')
if open == 0 then
  call('DEL', T .. ':tenants')
elseif open <= MAX_RECOUNT and call('HGET', T .. ':sweep', 'recount') == '1' then
  recount()
end
if open <= MAX_RECOUNT then call('HDEL', T .. ':sweep', 'recount') end
notes[#notes + 1] = 'audited'
notes[#notes + 1] = #slice == limit and first + limit or 0

-- Consumers of workers long gone.
if not cleaned or at - cleaned > 60000 then
  for _, code in ipairs(codes) do
    local name = STREAMS[code]
    local consumers = redis.pcall('XINFO', 'CONSUMERS', T .. name, 'w')
    for _, consumer in ipairs(consumers.err and {} or consumers) do
      local values = {}
      for i = 1, #consumer, 2 do values[consumer[i]] = consumer[i + 1] end
      if values.pending == 0 and values.idle > 600000 then
        redis.pcall('XGROUP', 'DELCONSUMER', T .. name, 'w', values.name)
      end
    end
  end
  notes[#notes + 1] = 'cleaned'
  notes[#notes + 1] = now
end

-- Somebody deleted the note of how many sub-lanes there were.
local noted = tonumber(call('HGET', T .. ':control', 'sub_lanes_top')) or 1
top = math.min(highest, 64)
if top > noted then call('HSET', T .. ':control', 'sub_lanes_top', top) end

-- Sub-lanes that are no longer in use, and hold nothing any more: from the last one on.
local used = tonumber(call('HGET', T .. ':control', 'sub_lanes')) or 1
local before = top
while top > used and top > 1 and is_left('h' .. top - 1) and is_left('n' .. top - 1) and is_left('b' .. top - 1) do
  top = top - 1
end
if top < before then
  call('HSET', T .. ':control', 'sub_lanes_top', top)
  -- The streams themselves stay, with the ids that they have given: a place must never come twice.
  for i = top, before - 1 do
    for _, letter in ipairs({'h', 'n', 'b'}) do redis.pcall('XGROUP', 'DESTROY', T .. STREAMS[letter .. i], 'w') end
  end
end

-- When the oldest waiting request of each lane was accepted, noted for those who watch the queue.
local waited = {}
for i, letter in ipairs({'h', 'n', 'b'}) do
  local accepted = 0
  local function look(code)
    local other = oldest(code)
    if other and (accepted == 0 or other < accepted) then accepted = other end
  end
  look(string.upper(letter))
  look(letter)
  for j = 1, top - 1 do look(letter .. j) end
  waited[i] = accepted > 0 and at - accepted or 0
  notes[#notes + 1] = 'oldest:' .. sub(STREAMS[letter], 4)
  notes[#notes + 1] = string.format('%.0f', accepted)
end
if more == 0 then -- else whoever is lazy goes on all the same
  notes[#notes + 1] = 'full'
  notes[#notes + 1] = now
end
call('HSET', T .. ':sweep', unpack(notes))
waited[4], waited[5] = counts.rids, counts.buried
return {#overdue, counts.requeued, counts.failed, counts.dead, counts.stray, more, grace and 1 or 0, unpack(waited)}
