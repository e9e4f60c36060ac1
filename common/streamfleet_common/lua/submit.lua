#!lua
-- Take requests in. Without flags on purpose: a full Redis refuses it as a whole, before anything is written.
-- KEYS[1] the tag of the shard. ARGV[1] max_queue_depth, used unless the queue's control hash sets one.
-- Then 10 values a request: rid, letter of the lane (h, n, b), "s" for streaming or "-", deadline in ms from now,
-- result ttl in ms, retry policy (`attempts.backoff.r` or `….f`), tokens it may take, tenant, digest of the
-- request, payload.
-- Values that a record cannot hold are refused with an error, before anything is written.
-- Replies one array a request: accepted and the depth it made | duplicate and the state letter |
-- conflict and the state letter | full, the depth, the limit, why (requests, tokens, paused, memory) and after
-- how many ms to try again.
local T = KEYS[1]
local LANES = {h = ':s:high', n = ':s:normal', b = ':s:bulk'}
local find = string.find
for at = 2, #ARGV, 10 do
  -- The limits of `Envelope`. A record that breaks them could not be ended, nor could the rest of its batch.
  local deadline, ttl = ARGV[at + 3], ARGV[at + 4]
  if #ARGV % 10 ~= 1 or #ARGV[at] ~= 34 or not find(ARGV[at], '^[%da-f]+$') or not LANES[ARGV[at + 1]]
    or not find(ARGV[at + 2], '^[s-]$')
    or not find(deadline, '^[1-9]%d*$') or tonumber(deadline) > 86400000
    or not find(ttl, '^[1-9]%d*$') or tonumber(ttl) > 604800000
    or not find(ARGV[at + 5], '^%d%d?%d?%.%d+%.[rf]$') or #ARGV[at + 5] > 16
    or not find(ARGV[at + 6], '^%d+$') or #ARGV[at + 6] > 9
    or not find(ARGV[at + 7], '^[%w_.-]+$') or not find(ARGV[at + 8], '^[^|\n]+$') then
    return redis.error_reply('ERR submit: the values of request ' .. (at + 8) / 10 .. ' are not valid')
  end
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local control = redis.call('HMGET', T .. ':control', 'max_queue_depth', 'max_queue_tokens', 'paused',
  'crowded_until')
local limit, token_limit = tonumber(control[1] or ARGV[1]), tonumber(control[2] or 0)
local depth = redis.call('ZCARD', T .. ':open')
local tokens = token_limit > 0 and tonumber(redis.call('HGET', T .. ':tenants', '*') or 0) or 0
local closed = control[3] == '1' and 'paused' or tonumber(control[4] or 0) > now and 'memory'
local count = (#ARGV - 1) / 10
local names = {}
for i = 1, count do names[i] = T .. ':r:' .. ARGV[10 * i - 8] end
local known = redis.call('MGET', unpack(names))

-- After how long a tenth of the queue has ended, going by the last sweeps.
local retry_after
local function full(why)
  if not retry_after then
    local rate = tonumber(redis.call('HGET', T .. ':sweep', 'rate') or 0)
    retry_after = 1000
    if rate > 0 then retry_after = math.max(100, math.min(30000, math.ceil(depth / 10 / rate * 1000))) end
  end
  return {'full', depth, limit, why, retry_after}
end

local replies, accepted, batch, added = {}, {}, {}, 0
for i = 1, count do
  local at = 10 * i - 8
  local rid, tenant, digest, cost = ARGV[at], ARGV[at + 7], ARGV[at + 8], tonumber(ARGV[at + 6])
  local record = known[i]
  local state, its_tenant, its_digest
  if record then
    local head = string.match(record, '^[^\n]*')
    state = string.sub(head, 1, 1)
    if state == 'E' then state = string.sub(head, 2, 2) end
    its_tenant, its_digest = string.match(head, '|([^|]*)|([^|]*)$')
  elseif batch[rid] then
    state, its_tenant, its_digest = 'Q', batch[rid][1], batch[rid][2]
  end
  if state then
    local same = its_tenant == tenant and its_digest == digest
    replies[i] = {same and 'duplicate' or 'conflict', state}
  elseif closed then
    replies[i] = full(closed)
  elseif depth >= limit then
    replies[i] = full('requests')
  elseif token_limit > 0 and depth > 0 and tokens + cost > token_limit then
    replies[i] = full('tokens') -- an empty queue takes any one request, or a large one could never come in
  else
    tokens = tokens + cost
    added = added + cost
    depth = depth + 1
    batch[rid] = {tenant, digest}
    accepted[#accepted + 1] = at
    replies[i] = {'accepted', depth}
  end
end
if #accepted == 0 then return replies end

local records, members = {}, {}
for _, at in ipairs(accepted) do
  local rid, lane = ARGV[at], ARGV[at + 1]
  local deadline = string.format('%.0f', now + ARGV[at + 3])
  local eid = redis.call('XADD', T .. LANES[lane], '*', 'r', rid, 'p', ARGV[at + 9])
  records[#records + 1] = T .. ':r:' .. rid
  records[#records + 1] = 'Q' .. deadline .. '|0|' .. lane .. eid .. '||0|0|0|0|' .. string.format('%.0f', now)
    .. '|' .. lane .. '|' .. ARGV[at + 2] .. '|' .. ARGV[at + 4] .. '|' .. ARGV[at + 5] .. '|' .. ARGV[at + 6]
    .. '|' .. ARGV[at + 7] .. '|' .. ARGV[at + 8]
  members[#members + 1] = deadline
  members[#members + 1] = rid
end
redis.call('MSET', unpack(records))
redis.call('ZADD', T .. ':open', unpack(members))
if added > 0 then redis.call('HINCRBY', T .. ':tenants', '*', string.format('%.0f', added)) end
return replies
