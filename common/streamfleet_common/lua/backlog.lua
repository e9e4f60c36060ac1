#!lua flags=no-writes
-- What waits in each stream of work that nobody has read, in its order. It writes nothing.
-- ARGV: how many of each stream at most.
-- Replies now, then a list for each stream that holds something: its letter, its sub-lane, when the oldest came there
-- (server ms), and the rids. Stands on its own.
local T, most = KEYS[1], tonumber(ARGV[1])
local NAMES = {
  {'H', ':s:high:again'}, {'h', ':s:high'}, {'N', ':s:normal:again'}, {'n', ':s:normal'},
  {'B', ':s:bulk:again'}, {'b', ':s:bulk'}, {'S', ':s:solo'},
}
local time = redis.call('TIME')
local replies = {string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))}

local function look(letter, number, key)
  local after = '-' -- nobody reads here yet
  local groups = redis.pcall('XINFO', 'GROUPS', key)
  for _, group in ipairs(groups.err and {} or groups) do
    local values = {}
    for i = 1, #group, 2 do values[group[i]] = group[i + 1] end
    if values.name == 'w' then after = '(' .. values['last-delivered-id'] end
  end
  local found = redis.pcall('XRANGE', key, after, '+', 'COUNT', most)
  if found.err or #found == 0 then return end
  local line = {letter, number, string.match(found[1][1], '^%d+')}
  for _, entry in ipairs(found) do
    local fields, rid = entry[2], ''
    for i = 1, #fields, 2 do
      if fields[i] == 'r' then rid = fields[i + 1] end
    end
    line[#line + 1] = rid
  end
  replies[#replies + 1] = line
end

local counts = redis.call('HMGET', T .. ':control', 'sub_lanes', 'sub_lanes_top')
local top = math.min(64, math.max(tonumber(counts[1]) or 1, tonumber(counts[2]) or 1))
for _, name in ipairs(NAMES) do
  look(name[1], 0, T .. name[2])
  if string.find('hnb', name[1], 1, true) then
    for i = 1, top - 1 do look(name[1], i, T .. name[2] .. ':' .. i) end
  end
end
return replies
