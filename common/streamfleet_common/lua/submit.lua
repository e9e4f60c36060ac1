#!lua
-- Take requests in. Without flags on purpose: a full Redis refuses it as a whole, before anything is written.
-- KEYS[1] the tag of the shard. ARGV[1] max_queue_depth, used unless the queue's control hash sets one.
-- Then 8 values a request: rid, lane, "s" for streaming or "-", deadline in ms from now, result ttl in ms,
-- tenant, digest of the request, payload.
-- Values that a record cannot hold are refused with an error, before anything is written.
-- Replies one array a request: accepted and the depth it made | duplicate and the state letter |
-- conflict and the state letter | full, the depth and the limit.
local T = KEYS[1]
local LANES = {high = true, normal = true, bulk = true}
local find = string.find
for at = 2, #ARGV, 8 do
  -- The limits of `Envelope`. A record that breaks them could not be ended, nor could the rest of its batch.
  local deadline, ttl = ARGV[at + 3], ARGV[at + 4]
  if #ARGV % 8 ~= 1 or #ARGV[at] ~= 34 or not find(ARGV[at], '^[%da-f]+$') or not LANES[ARGV[at + 1]]
    or not find(ARGV[at + 2], '^[s-]$')
    or not find(deadline, '^[1-9]%d*$') or tonumber(deadline) > 86400000
    or not find(ttl, '^[1-9]%d*$') or tonumber(ttl) > 604800000
    or not find(ARGV[at + 5], '^[%w_.-]+$') or not find(ARGV[at + 6], '^[^|\n]+$') then
    return redis.error_reply('ERR submit: the values of request ' .. (at + 6) / 8 .. ' are not valid')
  end
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local control = redis.call('HMGET', T .. ':control', 'max_queue_depth')
local limit = tonumber(control[1] or ARGV[1])
local depth = redis.call('ZCARD', T .. ':open')
local count = (#ARGV - 1) / 8
local names = {}
for i = 1, count do names[i] = T .. ':r:' .. ARGV[8 * i - 6] end
local known = redis.call('MGET', unpack(names))

local replies, accepted, batch = {}, {}, {}
for i = 1, count do
  local at = 8 * i - 6
  local rid, tenant, digest = ARGV[at], ARGV[at + 5], ARGV[at + 6]
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
  elseif depth >= limit then
    replies[i] = {'full', depth, limit}
  else
    depth = depth + 1
    batch[rid] = {tenant, digest}
    accepted[#accepted + 1] = at
    replies[i] = {'accepted', depth}
  end
end
if #accepted == 0 then return replies end

local records, members = {}, {}
for _, at in ipairs(accepted) do
  local rid, lane, stream, ttl = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 4]
  local deadline = string.format('%.0f', now + ARGV[at + 3])
  local eid = redis.call('XADD', T .. ':s:' .. lane, '*', 'r', rid, 'p', ARGV[at + 7])
  records[#records + 1] = T .. ':r:' .. rid
  records[#records + 1] = 'Q' .. deadline .. '|0|' .. eid .. '||0|0|0|0|' .. string.format('%.0f', now) .. '|'
    .. lane .. '|' .. stream .. '|' .. ttl .. '|' .. ARGV[at + 5] .. '|' .. ARGV[at + 6]
  members[#members + 1] = deadline
  members[#members + 1] = rid
end
redis.call('MSET', unpack(records))
redis.call('ZADD', T .. ':open', unpack(members))
return replies
