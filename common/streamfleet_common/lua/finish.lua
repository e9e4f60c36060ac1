#!lua flags=allow-oom
-- End running requests, if the caller still owns them.
-- ARGV: rid, fence, state letter, end event, `prompt tokens|completion tokens` for each. The letter T ("try again")
-- puts the request back, if it may be tried again, and fails it otherwise. It waits as its policy says; with T5000, for
-- 5,000 ms. The letter B ("bill") ends nothing: it only tells the tokens of one that somebody else has ended.
-- Replies for each: ok, again, fenced, gone (no record), or already|STATE LETTER. A repetition of the call that
-- wrote the end is ok again. Where the end is another's, written while the caller ran it, the tokens are added to the
-- ledger all the same, once.
local rids = {}
for at = 1, #ARGV, 5 do rids[#rids + 1] = ARGV[at] end
local now = clock()
local known = records(rids)
local replies = {}

-- Whether this very call has written the end that stands: same state, epoch and event.
local function repeated(record, fence, letter, event)
  local epoch = tonumber(match(fence, '^|(%d+)|'))
  if sub(letter, 1, 1) == 'T' then letter = 'F' end
  return epoch and sub(record, 2, 2) == letter and tonumber(match(record, '\n(%d+)-')) == epoch + 1
    and sub(record, -#event - 1) == ' ' .. event
end

-- Gives the record that it leaves behind.
local function bill(rid, record, fence, tokens)
  local state, rest, tenant, epoch = match(record, '^(E%a|)%+(%d+|%d+|([^|]*)|[^|\n]*\n(%d+)%-.*)$')
  -- Its end is one epoch above the one that ran.
  if tokens == '0|0' or not epoch or tonumber(epoch) - 1 ~= tonumber(match(fence, '^|(%d+)|')) then return record end
  call('SET', T .. ':r:' .. rid, state .. rest, 'KEEPTTL')
  local ledger = T .. ':usage:' .. day_of(now)
  local prompt, completion = match(tokens, '^(%d+)|(%d+)$')
  for kind, number in pairs({prompt = prompt, completion = completion}) do
    if number ~= '0' then redis.pcall('HINCRBY', ledger, tenant .. '|' .. kind .. '_tokens', number) end
  end
  redis.pcall('PEXPIRE', ledger, USAGE_MS) -- its first entry may be of a request that ended the day before
  return state .. rest
end

local done = {} -- the same request twice in one batch must not end twice
for i, rid in ipairs(rids) do
  local at = 5 * i - 4
  local fence, record, letter = ARGV[at + 1], known[i], ARGV[at + 2]
  if done[rid] then record = done[rid] end
  if not record then
    replies[i] = 'gone'
  elseif sub(record, 1, 1) == 'E' then
    if repeated(record, fence, letter, ARGV[at + 3]) then
      replies[i] = 'ok'
    else
      replies[i] = 'already|' .. sub(record, 2, 2)
      done[rid] = bill(rid, record, fence, ARGV[at + 4])
    end
  elseif letter ~= 'B' and sub(record, 1, 1) == 'R' and sub(record, 15, 14 + #fence) == fence then
    local outcome = 'ended'
    spent[rid] = ARGV[at + 4]
    if sub(letter, 1, 1) == 'T' then
      local pause = tonumber(sub(letter, 2)) or true
      letter = 'F'
      local crashes, solo = match(record, '^[^|]*|[^|]*|[^|]*|[^|]*|[^|]*|[^|]*|(%d+)|(%d+)|')
      local back = recovery()
      outcome = back.again(rid, record, crashes, solo, back.failures, pause, ARGV[at + 3], now)
      if outcome == 'unfound' then terminal(rid, record, 'F', ARGV[at + 3], now) end
    else
      terminal(rid, record, letter, ARGV[at + 3], now)
    end
    replies[i] = outcome == 'again' and 'again' or 'ok'
    done[rid] = outcome == 'again' and 'Q' or 'E' .. letter
  else
    replies[i] = 'fenced'
  end
end
settle()
return replies
