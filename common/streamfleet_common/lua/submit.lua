#!lua
-- Take requests in. Without flags on purpose: a full Redis refuses it as a whole, before anything is written.
-- KEYS[1] the tag of the shard. ARGV[1] max_queue_depth, used unless the queue's control hash sets one.
-- Then 4 values a request: rid, deadline in ms from now, what its record shall say of it, payload.
-- The record's part is `lane|stream|result ttl|POLICY|tokens|tenant|digest`: the letter of the lane (h, n, b), "s"
-- for streaming or "-", ms, the retry policy (`attempts.backoff.r` or `….f`), and how many tokens it may take.
-- Values that a record cannot hold are refused with an error, before anything is written.
-- Replies for each: accepted|DEPTH with it, duplicate|STATE LETTER, conflict|STATE LETTER, or
-- full|DEPTH|LIMIT|WHY|MS: why is requests, tokens, paused or memory, and after so many ms one may try again.
local T = KEYS[1]
local LANES = {h = T .. ':s:high', n = T .. ':s:normal', b = T .. ':s:bulk'}
local find, match, sub = string.find, string.match, string.sub
local ABOUT = '^[hnb]|[s-]|([1-9]%d*)|%d%d?%d?%.%d+%.[rf]|(%d+)|[%w_.-]+|[^|\n]+$'
local costs = {}
for at = 2, #ARGV, 4 do
  -- The limits of `Envelope`. A record that breaks them could not be ended, nor could the rest of its batch.
  local rid, deadline, about = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local ttl, cost
  if #ARGV % 4 == 1 and #rid == 34 and not find(rid, '[^%da-f]') and find(deadline, '^[1-9]%d*$') then
    ttl, cost = match(about, ABOUT)
  end
  if not ttl or tonumber(ttl) > 604800000 or tonumber(deadline) > 86400000 or #cost > 9 or #about > 400 then
    return redis.error_reply('ERR submit: the values of request ' .. (at + 2) / 4 .. ' are not valid')
  end
  costs[#costs + 1] = tonumber(cost)
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local control = redis.call('HMGET', T .. ':control', 'max_queue_depth', 'max_queue_tokens', 'paused',
  'crowded_until')
local limit, token_limit = tonumber(control[1] or ARGV[1]), tonumber(control[2] or 0)
local depth = redis.call('ZCARD', T .. ':open')
local tokens = token_limit > 0 and tonumber(redis.call('HGET', T .. ':tenants', '*') or 0) or 0
local closed = control[3] == '1' and 'paused' or tonumber(control[4] or 0) > now and 'memory'
local count = #costs
local names = {}
for i = 1, count do names[i] = T .. ':r:' .. ARGV[4 * i - 2] end
local known = redis.call('MGET', unpack(names))

-- After how long a tenth of the queue has ended, going by the last sweeps.
local retry_after
local function full(why)
  if not retry_after then
    local rate = tonumber(redis.call('HGET', T .. ':sweep', 'rate') or 0)
    retry_after = 1000
    if rate > 0 then retry_after = math.max(100, math.min(30000, math.ceil(depth / 10 / rate * 1000))) end
  end
  -- How fast requests end says nothing about when a pause does, or how soon memory is free.
  local after = (why == 'paused' or why == 'memory') and math.max(1000, retry_after) or retry_after
  return 'full|' .. depth .. '|' .. limit .. '|' .. why .. '|' .. after
end

local replies, accepted, batch, added = {}, {}, {}, 0
for i = 1, count do
  local at = 4 * i - 2
  local rid, cost = ARGV[at], costs[i]
  local record = known[i] or batch[rid]
  if record then
    local head = match(record, '^[^\n]*')
    local state = sub(head, 1, 1)
    if state == 'E' then state = sub(head, 2, 2) end
    local same = match(head, '|[^|]*|[^|]*$') == match(ARGV[at + 2], '|[^|]*|[^|]*$') -- tenant and digest
    replies[i] = (same and 'duplicate|' or 'conflict|') .. state
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
    batch[rid] = 'Q|' .. ARGV[at + 2]
    accepted[#accepted + 1] = at
    replies[i] = 'accepted|' .. depth
  end
end
if #accepted == 0 then return replies end

local records, members = {}, {}
local text = string.format('%.0f', now)
for i, at in ipairs(accepted) do
  local rid, about = ARGV[at], ARGV[at + 2]
  local deadline = string.format('%.0f', now + ARGV[at + 1])
  local lane = sub(about, 1, 1)
  local eid = redis.call('XADD', LANES[lane], '*', 'r', rid, 'p', ARGV[at + 3])
  records[2 * i - 1] = T .. ':r:' .. rid
  records[2 * i] = 'Q' .. deadline .. '|0|' .. lane .. eid .. '||0|0|0|0|' .. text .. '|' .. about
  members[2 * i - 1] = deadline
  members[2 * i] = rid
end
redis.call('MSET', unpack(records))
redis.call('ZADD', T .. ':open', unpack(members))
if added > 0 then redis.call('HINCRBY', T .. ':tenants', '*', string.format('%.0f', added)) end
return replies
