-- What the scripts below share. A record is text:
--   open:   Q or R, deadline|epoch|place|owner|started|attempts|crashes|solo losses|META
--           and, while it waits for its next try (no place), a line feed and the payload
--   ended:  E, state letter|crashes|solo losses|tenant|digest, line feed, frame of the end event, which says the rest.
--           A + before the crashes: it was cancelled, or its time was up, while it ran, and what that took is in no
--           ledger yet. To whoever only reads it, the number is the same.
--   META:   accepted|lane letter|stream|result ttl|POLICY|tokens|tenant|digest
--   POLICY: attempts (0: as the fleet thinks right).backoff in ms.r or f (restart, or fail once text was shown)
-- State letters: Q queued, R running, D done, F failed, C cancelled, X expired, P dead.
-- A place is the letter of a stream and the id of an entry; in a sub-lane above the first, its number and a dot stand
-- between them. Letter and number together are the code of a stream: n, n3.
-- A frame is `epoch-seq`, for start and end also `,queued,started,now,attempts`, a space, and the event.
local T = KEYS[1]
local call, sub, match, find = redis.call, string.sub, string.match, string.find
local MAX_FRAME = 16384 -- a larger frame is announced without its event, to be read from the log or the record
local LOG_LINGER_MS = 60000 -- the record holds the whole answer, so the log need not outlive its readers for long
local BILL_MS = 60000 -- a record that waits for its worker to tell what it took lives at least so long
local STREAMS = {
  h = ':s:high', n = ':s:normal', b = ':s:bulk',
  H = ':s:high:again', N = ':s:normal:again', B = ':s:bulk:again', S = ':s:solo',
}
setmetatable(STREAMS, {__index = function(_, code)
  local letter, number = match(code, '^([hnb])(%d+)$')
  return rawget(STREAMS, letter) .. ':' .. number
end})
local USAGE_MS = 400 * 86400000

local function clock()
  local time = call('TIME')
  return string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
end

-- Code and entry of a place.
local function split(place)
  if find(place, '.', 2, true) then return match(place, '^(%a%d+)%.(.*)$') end
  return sub(place, 1, 1), sub(place, 2)
end

local function records(rids)
  local names = {}
  for i = 1, #rids do names[i] = T .. ':r:' .. rids[i] end
  return call('MGET', unpack(names))
end

-- deadline, epoch, place, owner, started, attempts, crashes, solo, meta; nil unless the record is open
local function open_fields(record)
  return match(record, '^[QR](%d+)|(%d+)|([^|]*)|([^|]*)|(%d+)|(%d+)|(%d+)|(%d+)|(.*)$')
end

-- accepted, lane, stream, ttl, tokens, tenant
local function meta_fields(meta)
  return match(meta, '^(%d+)|(%a)|([s-])|(%d+)|[^|]*|(%d+)|([^|]*)|')
end

local function publish(tenant, rid, head, frame)
  if #frame > MAX_FRAME then frame = head .. ' ' end
  call('PUBLISH', T .. ':c:' .. tenant .. ':' .. rid, frame)
end

-- True if the log took the frame. It refuses an id at or below its top: the repetition of an earlier call. An
-- error here must not stop the script halfway.
local function log(rid, id, frame)
  return type(redis.pcall('XADD', T .. ':ev:' .. rid, id, 'f', frame)) ~= 'table'
end

-- Work to be taken off the streams, and off the counts, once for the whole batch. `tenants`: of each the number of
-- ends, of failures among them, the tokens that its open requests might have taken, and those they took. `running`:
-- the tokens of those that ran and do so no more.
local ended = {rids = {}, entries = {}, later = {}, tenants = {}, running = 0, uncounted = false}
local spent = {} -- rid to `prompt tokens|completion tokens`, where they are known

local function leave(place, rid)
  if place == '' then
    ended.later[#ended.later + 1] = rid
    return
  end
  local code, eid = split(place)
  local entries = ended.entries[code]
  if not entries then
    entries = {}
    ended.entries[code] = entries
  end
  entries[#entries + 1] = eid
end

-- Of an open record, in one scan: epoch, place, started, attempts, losses, accepted, stream, ttl, tokens, whose
-- (tenant and digest), tenant.
local ENDING = '^[QR]%d+|(%d+)|([^|]*)|[^|]*|(%d+)|(%d+)|(%d+|%d+)|(%d+)|%a|([s-])|(%d+)|[^|]*|(%d+)|(([^|]*)|[^|\n]*)'

-- The only writer of an end. The caller has checked that the record is open.
local function terminal(rid, record, letter, body, now)
  ended.rids[#ended.rids + 1] = rid
  local epoch, place, started, attempts, losses, accepted, stream, ttl, tokens, whose, tenant = match(record, ENDING)
  if not epoch then -- written by hand: it must not hold up the rest of the batch
    ended.uncounted = true
    return
  end
  epoch = string.format('%.0f', epoch + 1)
  local head = epoch .. '-1,' .. accepted .. ',' .. started .. ',' .. now .. ',' .. attempts
  local frame = head .. ' ' .. body
  local sign = '|'
  if (letter == 'C' or letter == 'X') and sub(record, 1, 1) == 'R' and not spent[rid] then
    sign = '|+'
    if tonumber(ttl) < BILL_MS then ttl = BILL_MS end
  end
  call('SET', T .. ':r:' .. rid, 'E' .. letter .. sign .. losses .. '|' .. whose .. '\n' .. frame, 'PX', ttl)
  if stream == 's' then
    log(rid, epoch .. '-1', frame)
    call('PEXPIRE', T .. ':ev:' .. rid, LOG_LINGER_MS)
  end
  publish(tenant, rid, head, frame)
  local sums = ended.tenants[tenant]
  if not sums then
    sums = {now = now, ends = 0, failed = 0, tokens = 0, prompt = 0, completion = 0}
    ended.tenants[tenant] = sums
  end
  sums.ends = sums.ends + 1
  sums.tokens = sums.tokens + tokens
  if sub(record, 1, 1) == 'R' then ended.running = ended.running + tokens end
  if letter == 'F' or letter == 'P' then sums.failed = sums.failed + 1 end
  if spent[rid] then
    local prompt, completion = match(spent[rid], '^(%d+)|(%d+)$')
    sums.prompt = sums.prompt + (prompt or 0)
    sums.completion = sums.completion + (completion or 0)
  end
  leave(place, rid)
end

local function discard(code, eids)
  -- Somebody may have destroyed the group, or the key; what is left of the script must still run.
  redis.pcall('XACK', T .. STREAMS[code], 'w', unpack(eids))
  redis.pcall('XDEL', T .. STREAMS[code], unpack(eids))
end

-- The day of a time in ms, as YYYYMMDD in UTC: Redis gives scripts no calendar.
local function day_of(ms)
  local floor = math.floor
  local z = floor(ms / 86400000) + 719468
  local era = floor(z / 146097)
  local doe = z - era * 146097
  local yoe = floor((doe - floor(doe / 1460) + floor(doe / 36524) - floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + floor(yoe / 4) - floor(yoe / 100))
  local mp = floor((5 * doy + 2) / 153)
  local month = mp < 10 and mp + 3 or mp - 9
  local year = yoe + era * 400 + (month <= 2 and 1 or 0)
  return year * 10000 + month * 100 + doy - floor((153 * mp + 2) / 5) + 1
end

-- Somebody may have written there by hand, which must not stop the script.
local function count_down(key, field, number)
  local left = redis.pcall('HINCRBY', key, field, -number)
  if type(left) ~= 'number' or left < 0 then ended.uncounted = true end -- it had never been counted
  if type(left) ~= 'number' or left <= 0 then redis.pcall('HDEL', key, field) end
end

local function settle()
  for code, eids in pairs(ended.entries) do discard(code, eids) end
  if #ended.later > 0 then call('ZREM', T .. ':later', unpack(ended.later)) end
  local tenants, ledger, tokens = T .. ':tenants', nil, 0
  if ended.running > 0 then count_down(tenants, '*|r', ended.running) end
  if #ended.rids > 0 then
    call('ZREM', T .. ':open', unpack(ended.rids))
    call('HINCRBY', T .. ':sweep', 'ended', #ended.rids)
  end
  for tenant, one in pairs(ended.tenants) do
    tokens = tokens + one.tokens
    count_down(tenants, tenant, one.ends)
    if one.tokens > 0 then count_down(tenants, tenant .. '|t', one.tokens) end
    ledger = ledger or T .. ':usage:' .. day_of(one.now)
    local sum = redis.pcall('HINCRBY', ledger, tenant .. '|requests', one.ends)
    if sum == one.ends then redis.pcall('PEXPIRE', ledger, USAGE_MS) end
    if one.prompt > 0 then redis.pcall('HINCRBY', ledger, tenant .. '|prompt_tokens', one.prompt) end
    if one.completion > 0 then redis.pcall('HINCRBY', ledger, tenant .. '|completion_tokens', one.completion) end
    if one.failed > 0 then redis.pcall('HINCRBY', ledger, tenant .. '|failed', one.failed) end
  end
  if tokens > 0 then count_down(tenants, '*', tokens) end
  if ended.uncounted then call('HSET', T .. ':sweep', 'recount', '1') end
end
