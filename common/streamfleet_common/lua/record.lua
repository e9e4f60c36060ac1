-- What the scripts below share. A record is text:
--   open:   Q or R, deadline|epoch|place|owner|started|attempts|crashes|solo losses|META
--           and, while it waits for its next try (no place), a line feed and the payload
--   ended:  E, state letter|crashes|solo losses|tenant|digest, line feed, frame of the end event, which says the rest
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
local STREAMS = {
  h = ':s:high', n = ':s:normal', b = ':s:bulk',
  H = ':s:high:again', N = ':s:normal:again', B = ':s:bulk:again', S = ':s:solo',
}
setmetatable(STREAMS, {__index = function(_, code)
  local letter, number = match(code, '^([hnb])(%d+)$')
  return rawget(STREAMS, letter) .. ':' .. number
end})
local MAX_SUB_LANES = 64
local USAGE_MS = 400 * 86400000

local function clock()
  local time = call('TIME')
  return string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
end

-- The day of a time in ms, as YYYYMMDD in UTC: Redis gives scripts no calendar.
local function day_of(ms)
  local z = math.floor(ms / 86400000) + 719468
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local mp = math.floor((5 * doy + 2) / 153)
  local day = doy - math.floor((153 * mp + 2) / 5) + 1
  local month = mp < 10 and mp + 3 or mp - 9
  return string.format('%04d%02d%02d', yoe + era * 400 + (month <= 2 and 1 or 0), month, day)
end

-- Code and entry of a place; and back.
local function split(place)
  if find(place, '.', 2, true) then return match(place, '^(%a%d+)%.(.*)$') end
  return sub(place, 1, 1), sub(place, 2)
end

local function place_at(code, eid)
  if #code == 1 then return code .. eid end
  return code .. '.' .. eid
end

-- How many sub-lanes of each lane may hold something: as many as are in use, or were, until those are empty.
local function sub_lanes()
  local found = call('HMGET', T .. ':control', 'sub_lanes', 'sub_lanes_top')
  return math.max(1, math.min(MAX_SUB_LANES, math.max(tonumber(found[1]) or 1, tonumber(found[2]) or 1)))
end

-- The codes of all streams of work.
local function all_codes(top)
  local codes = {'h', 'n', 'b', 'H', 'N', 'B', 'S'}
  for i = 1, top - 1 do
    for _, letter in ipairs({'h', 'n', 'b'}) do codes[#codes + 1] = letter .. i end
  end
  return codes
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
-- ends, of failures among them, the tokens that its open requests might have taken, and those they took.
local function nothing() return {rids = {}, entries = {}, later = {}, tenants = {}, uncounted = false} end
local ended = nothing()
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

-- An open request whose record is gone: whose it was, and what it counted for, nobody knows.
local function vanish(rid)
  ended.rids[#ended.rids + 1] = rid
  ended.uncounted = true
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
  call('SET', T .. ':r:' .. rid, 'E' .. letter .. '|' .. losses .. '|' .. whose .. '\n' .. frame, 'PX', ttl)
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

-- Somebody may have written there by hand; what is left of the script must still run.
local function add(key, field, number)
  local sum = redis.pcall('HINCRBY', key, field, string.format('%.0f', number))
  return type(sum) == 'number' and sum or nil
end

local function uncount(field, number)
  if number == 0 then return end
  local left = add(T .. ':tenants', field, -number)
  if left and left > 0 then return end
  if left ~= 0 then ended.uncounted = true end -- it had never been counted
  redis.pcall('HDEL', T .. ':tenants', field)
end

-- The ledger: what each tenant had, by the day of the end.
local function book(tenant, sums, key)
  if add(key, tenant .. '|requests', sums.ends) == sums.ends then redis.pcall('PEXPIRE', key, USAGE_MS) end
  if sums.prompt > 0 then add(key, tenant .. '|prompt_tokens', sums.prompt) end
  if sums.completion > 0 then add(key, tenant .. '|completion_tokens', sums.completion) end
  if sums.failed > 0 then add(key, tenant .. '|failed', sums.failed) end
end

local function settle()
  for code, eids in pairs(ended.entries) do discard(code, eids) end
  if #ended.later > 0 then call('ZREM', T .. ':later', unpack(ended.later)) end
  if #ended.rids == 0 then return end
  call('ZREM', T .. ':open', unpack(ended.rids))
  call('HINCRBY', T .. ':sweep', 'ended', #ended.rids)
  local tokens, day = 0, nil
  for tenant, sums in pairs(ended.tenants) do
    tokens = tokens + sums.tokens
    uncount(tenant, sums.ends)
    uncount(tenant .. '|t', sums.tokens)
    day = day or day_of(sums.now)
    book(tenant, sums, T .. ':usage:' .. day)
  end
  uncount('*', tokens)
  if ended.uncounted then call('HSET', T .. ':sweep', 'recount', '1') end
end
