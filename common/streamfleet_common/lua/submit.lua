#!lua
-- Take requests in. Without flags on purpose: a full Redis refuses it as a whole, before anything is written.
-- KEYS[1] the tag of the shard. ARGV[1] max_queue_depth, used unless the queue's control hash sets one.
-- Then 4 values a request: rid, deadline in ms from now, what its record shall say of it, payload.
-- The record's part is `lane|stream|result ttl|POLICY|tokens|tenant|digest`: the letter of the lane (h, n, b), "s"
-- for streaming or "-", ms, the retry policy (`attempts.backoff.r` or `….f`), and how many tokens it may take.
-- Values that a record cannot hold are refused with an error, before anything is written.
-- Replies for each: accepted|DEPTH with it, duplicate|STATE LETTER, conflict|STATE LETTER, or
-- full|DEPTH|LIMIT|WHY|MS: why is requests, tokens, paused or memory, or tenant_requests, tenant_tokens or
-- tenant_budget where the share of its own tenant is used up (the limit is then that of the share), and after so many ms
-- one may try again.
local T = KEYS[1]
local LANES = {h = T .. ':s:high', n = T .. ':s:normal', b = T .. ':s:bulk'}
local find, match, sub, floor = string.find, string.match, string.sub, math.floor
local MAX_BUDGET_WAIT_MS = 3600000
local ABOUT = '^[hnb]|[s-]|([1-9]%d*)|%d%d?%d?%.%d+%.[rf]|(%d+)|([%w_.-]+)|[^|\n]+$'
local costs, whose, tenants = {}, {}, {}
for at = 2, #ARGV, 4 do
  -- The limits of `Envelope`. A record that breaks them could not be ended, nor could the rest of its batch.
  local rid, deadline, about = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local ttl, cost, tenant
  if #ARGV % 4 == 1 and #rid == 34 and not find(rid, '[^%da-f]') and find(deadline, '^[1-9]%d*$') then
    ttl, cost, tenant = match(about, ABOUT)
  end
  if not ttl or tonumber(ttl) > 604800000 or tonumber(deadline) > 86400000 or #cost > 9 or #about > 400 then
    return redis.error_reply('ERR submit: the values of request ' .. (at + 2) / 4 .. ' are not valid')
  end
  costs[#costs + 1] = tonumber(cost)
  if not tenants[tenant] then tenants[tenant] = {added = 0, cost = 0, lane = 0} end
  whose[#whose + 1] = tenants[tenant]
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local control = redis.call('HMGET', T .. ':control', 'max_queue_depth', 'max_queue_tokens', 'paused',
  'crowded_until', 'sub_lanes')
local F = math.max(1, math.min(64, floor(tonumber(control[5]) or 1))) -- sub-lanes of each lane
local limit, token_limit = tonumber(control[1] or ARGV[1]), tonumber(control[2] or 0)
local depth = redis.call('ZCARD', T .. ':open')
local tokens = token_limit > 0 and tonumber(redis.call('HGET', T .. ':tenants', '*') or 0) or 0
local closed = control[3] == '1' and 'paused' or tonumber(control[4] or 0) > now and 'memory'
local count = #costs
local names = {}
for i = 1, count do names[i] = T .. ':r:' .. ARGV[4 * i - 2] end
local known = redis.call('MGET', unpack(names))

-- The tenants of the batch, each with its sub-lane, its share and what counts against that, if it has one.
local order = {}
for tenant in pairs(tenants) do order[#order + 1] = tenant end
local shares = redis.pcall('HMGET', T .. ':shares', '*', unpack(order))
for i, tenant in ipairs(order) do
  local one = tenants[tenant]
  if F > 1 then one.lane = tonumber(sub(redis.sha1hex(tenant), 1, 8), 16) % F end
  local most, most_tokens, daily = match(shares[i + 1] or shares[1] or '', '^(%d+)|(%d+)|(%d+)$')
  if most then
    local open = redis.pcall('HMGET', T .. ':tenants', tenant, tenant .. '|t')
    one.most, one.most_tokens, one.daily = tonumber(most), tonumber(most_tokens), tonumber(daily)
    one.open, one.tokens, one.used = tonumber(open[1]) or 0, tonumber(open[2]) or 0, 0
    if one.daily > 0 then
      -- As YYYYMMDD in UTC: Redis gives scripts no calendar.
      local z = floor(now / 86400000) + 719468
      local era = floor(z / 146097)
      local doe = z - era * 146097
      local yoe = floor((doe - floor(doe / 1460) + floor(doe / 36524) - floor(doe / 146096)) / 365)
      local doy = doe - (365 * yoe + floor(yoe / 4) - floor(yoe / 100))
      local mp = floor((5 * doy + 2) / 153)
      local month = mp < 10 and mp + 3 or mp - 9
      local year = yoe + era * 400 + (month <= 2 and 1 or 0)
      local today = year * 10000 + month * 100 + doy - floor((153 * mp + 2) / 5) + 1
      local used = redis.call('HMGET', T .. ':usage:' .. today, tenant .. '|prompt_tokens',
        tenant .. '|completion_tokens')
      one.used = (tonumber(used[1]) or 0) + (tonumber(used[2]) or 0)
    end
  end
end

-- Which limit of its tenant's share a request would break, and how high that is.
local function over(one, cost)
  local open, tokens = one.open + one.added, one.tokens + one.cost
  if one.most > 0 and open >= one.most then return 'tenant_requests', one.most end
  -- Who has nothing open may have any one request, or a large one could never come in.
  if one.most_tokens > 0 and open > 0 and tokens + cost > one.most_tokens then
    return 'tenant_tokens', one.most_tokens
  end
  if one.daily > 0 and one.used + tokens + cost > one.daily then return 'tenant_budget', one.daily end
end

-- After how long a tenth of the queue has ended, going by the last sweeps.
local retry_after
local function full(why, most)
  if not retry_after then
    local rate = tonumber(redis.call('HGET', T .. ':sweep', 'rate') or 0)
    retry_after = 1000
    if rate > 0 then retry_after = math.max(100, math.min(30000, math.ceil(depth / 10 / rate * 1000))) end
  end
  -- How fast requests end says nothing about when a pause does, or how soon memory is free.
  local after = (why == 'paused' or why == 'memory') and math.max(1000, retry_after) or retry_after
  if why == 'tenant_budget' then
    after = math.max(1000, math.min(MAX_BUDGET_WAIT_MS, 86400000 - now % 86400000)) -- a day of UTC
  end
  return 'full|' .. depth .. '|' .. string.format('%.0f', most or limit) .. '|' .. why .. '|' .. after
end

local replies, accepted, batch, added = {}, {}, {}, 0
for i = 1, count do
  local at = 4 * i - 2
  local rid, cost, one = ARGV[at], costs[i], whose[i]
  local reason, most
  if one.most then reason, most = over(one, cost) end
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
  elseif reason then
    replies[i] = full(reason, most) -- this tenant's alone: the others of the batch come in
  elseif token_limit > 0 and depth > 0 and tokens + cost > token_limit then
    replies[i] = full('tokens') -- an empty queue takes any one request, or a large one could never come in
  else
    tokens = tokens + cost
    added = added + cost
    one.added = one.added + 1
    one.cost = one.cost + cost
    depth = depth + 1
    batch[rid] = 'Q|' .. ARGV[at + 2]
    accepted[#accepted + 1] = i
    replies[i] = 'accepted|' .. depth
  end
end
if #accepted == 0 then return replies end

local records, members, lanes = {}, {}, {}
local text = string.format('%.0f', now)
for i, number in ipairs(accepted) do
  local at = 4 * number - 2
  local rid, about = ARGV[at], ARGV[at + 2]
  local deadline = string.format('%.0f', now + ARGV[at + 1])
  local lane = sub(about, 1, 1)
  local key, code, sub_lane = LANES[lane], lane, whose[number].lane
  if sub_lane > 0 then key, code = key .. ':' .. sub_lane, lane .. sub_lane .. '.' end
  lanes[lane] = true
  local eid = redis.call('XADD', key, '*', 'r', rid, 'p', ARGV[at + 3])
  records[2 * i - 1] = T .. ':r:' .. rid
  records[2 * i] = 'Q' .. deadline .. '|0|' .. code .. eid .. '||0|0|0|0|' .. text .. '|' .. about
  members[2 * i - 1] = deadline
  members[2 * i] = rid
end
redis.call('MSET', unpack(records))
redis.call('ZADD', T .. ':open', unpack(members))
if added > 0 then redis.pcall('HINCRBY', T .. ':tenants', '*', added) end
-- Where nobody waited, these are the oldest now. Those who watch the queue may not read in its streams.
local fields = {}
for lane in pairs(lanes) do fields[#fields + 1] = 'oldest:' .. sub(LANES[lane], #T + 4) end
local noted = redis.pcall('HMGET', T .. ':sweep', unpack(fields))
for i, field in ipairs(fields) do
  if not noted[i] or noted[i] == '0' then redis.pcall('HSET', T .. ':sweep', field, text) end
end
for tenant, one in pairs(tenants) do
  if one.added > 0 then redis.pcall('HINCRBY', T .. ':tenants', tenant, one.added) end
  if one.cost > 0 then redis.pcall('HINCRBY', T .. ':tenants', tenant .. '|t', one.cost) end
end
return replies
