-- What the scripts below share. A record is text:
--   open:   Q or R, deadline|epoch|place|owner|started|attempts|crashes|solo losses|META
--           and, while it waits for its next try (no place), a line feed and the payload
--   ended:  E, state letter|crashes|solo losses|tenant|digest, line feed, frame of the end event, which says the rest
--   META:   accepted|lane letter|stream|result ttl|POLICY|tokens|tenant|digest
--   POLICY: attempts (0: as the fleet thinks right).backoff in ms.r or f (restart, or fail once text was shown)
-- State letters: Q queued, R running, D done, F failed, C cancelled, X expired, P dead.
-- A place is the letter of a stream and the id of an entry.
-- A frame is `epoch-seq`, for start and end also `,queued,started,now,attempts`, a space, and the event.
local T = KEYS[1]
local call, sub, match = redis.call, string.sub, string.match
local MAX_FRAME = 16384 -- a larger frame is announced without its event, to be read from the log or the record
local LOG_LINGER_MS = 60000 -- the record holds the whole answer, so the log need not outlive its readers for long
local STREAMS = {
  h = ':s:high', n = ':s:normal', b = ':s:bulk',
  H = ':s:high:again', N = ':s:normal:again', B = ':s:bulk:again', S = ':s:solo',
}

local function clock()
  local time = call('TIME')
  return string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
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

-- Work to be taken off the streams once for the whole batch.
local ended = {rids = {}, entries = {}, later = {}, tokens = 0}

local function leave(place, rid)
  if place == '' then
    ended.later[#ended.later + 1] = rid
    return
  end
  local letter = sub(place, 1, 1)
  local entries = ended.entries[letter]
  if not entries then
    entries = {}
    ended.entries[letter] = entries
  end
  entries[#entries + 1] = sub(place, 2)
end

-- Of an open record, in one scan: epoch, place, started, attempts, losses, accepted, stream, ttl, tokens, whose
-- (tenant and digest), tenant.
local ENDING = '^[QR]%d+|(%d+)|([^|]*)|[^|]*|(%d+)|(%d+)|(%d+|%d+)|(%d+)|%a|([s-])|(%d+)|[^|]*|(%d+)|(([^|]*)|[^|\n]*)'

-- The only writer of an end. The caller has checked that the record is open.
local function terminal(rid, record, letter, body, now)
  ended.rids[#ended.rids + 1] = rid
  local epoch, place, started, attempts, losses, accepted, stream, ttl, tokens, whose, tenant = match(record, ENDING)
  if not epoch then return end -- written by hand: it must not hold up the rest of the batch
  epoch = string.format('%.0f', epoch + 1)
  local head = epoch .. '-1,' .. accepted .. ',' .. started .. ',' .. now .. ',' .. attempts
  local frame = head .. ' ' .. body
  call('SET', T .. ':r:' .. rid, 'E' .. letter .. '|' .. losses .. '|' .. whose .. '\n' .. frame, 'PX', ttl)
  if stream == 's' then
    log(rid, epoch .. '-1', frame)
    call('PEXPIRE', T .. ':ev:' .. rid, LOG_LINGER_MS)
  end
  publish(tenant, rid, head, frame)
  ended.tokens = ended.tokens + tokens
  leave(place, rid)
end

local function discard(letter, eids)
  -- Somebody may have destroyed the group, or the key; what is left of the script must still run.
  redis.pcall('XACK', T .. STREAMS[letter], 'w', unpack(eids))
  redis.pcall('XDEL', T .. STREAMS[letter], unpack(eids))
end

local function settle()
  for letter, eids in pairs(ended.entries) do discard(letter, eids) end
  if #ended.later > 0 then call('ZREM', T .. ':later', unpack(ended.later)) end
  if #ended.rids == 0 then return end
  call('ZREM', T .. ':open', unpack(ended.rids))
  call('HINCRBY', T .. ':sweep', 'ended', #ended.rids)
  if ended.tokens > 0
    and call('HINCRBY', T .. ':tenants', '*', string.format('-%.0f', ended.tokens)) <= 0 then
    call('HDEL', T .. ':tenants', '*')
  end
end
