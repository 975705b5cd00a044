"""What Redis does in one step each, in its Lua.

All keys begin with the same prefix, whose braces keep them on one machine of a cluster:

    epoch       a random name for what is here: it is another one when somebody has emptied Redis
    members     the hubs that live: a sorted set of incarnations, by when they were last heard, in ms of Redis' clock
    seq         the number of the last change
    log         the changes, a stream whose ids are seq-0, without a gap
    runs        the names of runs, a sorted set by the change at which they were last used
    bytes       what is catalogued
    run:NAME    a hash: `a` the description, `n` the bytes of the run, and for each chunk its span and its record
    tok:NAME    the tokens of the run, from position 0

A record begins with the bytes of the chunk as decimal digits and a colon; the rest is the hubs' affair.

Other programs may have written here too. No script fails at a run, a record or a change that no hub has written, and
none answers with more of it than the hubs write themselves.
"""

MAX_TOKENS = 2**24
"""The most tokens of a run: as many as the longest prompt that a hub takes unless it is configured for more."""
MAX_CHUNKS = 2**18
MAX_DESCRIPTION_BYTES = MAX_RECORD_BYTES = 2**16
MAX_ANSWERED_BYTES = 2**26
"""The bytes of runs in one answer, after which the rest is asked for again."""

COMMON = """
local p = KEYS[1]
local function key(name) return p .. name end
local function whole(text) return tonumber(string.match(text or '', '^%d+') or '0') end
local function size_of(record) return string.find(record, '^%d+:') and whole(record) or 0 end
local function kind_of(name) return redis.call('TYPE', key(name)).ok end
local function now()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
local function add_bytes(name, n)
  local run = key('run:' .. name)
  redis.call('HSET', run, 'n', string.format('%d', whole(redis.call('HGET', run, 'n')) + n))
  redis.call('INCRBY', key('bytes'), string.format('%d', n))  -- Lua writes zero taken away as -0
end
-- After what others have put behind the last change, or in place of the log, no change could be noted.
local function mend_log(last)
  local top = kind_of('log') == 'stream' and redis.call('XREVRANGE', key('log'), '+', '-', 'COUNT', 1)[1]
  if not top or top[1] ~= string.format('%d-0', last) then redis.call('DEL', key('log')) end
end
local function note_change(writer, kind, name, spans, most)
  local seq = redis.call('INCR', key('seq'))
  mend_log(seq - 1)
  redis.call('XADD', key('log'), 'MAXLEN', '=', most, string.format('%d-0', seq),
    'w', writer, 'k', kind, 'r', name, 's', spans)
  return seq
end
local function forget_run(name)
  local n = kind_of('run:' .. name) == 'hash' and redis.call('HGET', key('run:' .. name), 'n')
  redis.call('DECRBY', key('bytes'), string.format('%d', whole(n or '')))
  redis.call('DEL', key('run:' .. name), key('tok:' .. name))
  redis.call('ZREM', key('runs'), name)
end
-- A run whose keys are not of its types can neither be read nor go on.
local function mend_run(name)
  local run, tokens = kind_of('run:' .. name), kind_of('tok:' .. name)
  if run == 'hash' and tokens == 'string' or run == 'none' and tokens == 'none' then return end
  forget_run(name)
end
"""

FOLLOW = """
-- ARGV: incarnation, 1 to join, which life of Redis, the last change known, most entries, ms after which a hub is dead,
-- most bytes of a change
local known, t = tonumber(ARGV[4]), now()
redis.call('ZREMRANGEBYSCORE', key('members'), '-inf', t - tonumber(ARGV[6]))
if ARGV[2] ~= '1' and not redis.call('ZSCORE', key('members'), ARGV[1]) then return {'fenced'} end
redis.call('ZADD', key('members'), t, ARGV[1])
redis.call('SET', key('epoch'), ARGV[1], 'NX')
local life = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)') .. redis.call('GET', key('epoch'))
local last = tonumber(redis.call('GET', key('seq')) or '0')
mend_log(last)
local about = {redis.call('ZCARD', key('members')), tonumber(redis.call('GET', key('bytes')) or '0')}
local oldest = redis.call('XRANGE', key('log'), '-', '+', 'COUNT', 1)
local first = last + 1
if #oldest > 0 then first = tonumber(string.match(oldest[1][1], '^(%d+)')) end
if ARGV[3] ~= life or known > last or known + 1 < first then return {'lost', life, last, about} end
local from = string.format('%d-0', known + 1)
local changes = {}
for at, entry in ipairs(redis.call('XRANGE', key('log'), from, '+', 'COUNT', ARGV[5])) do
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  local w, k, r, s = fields.w or '', fields.k or '', fields.r or '', fields.s or ''
  if #w + #k + #r + #s > tonumber(ARGV[7]) then r, s = '', '' end
  if s == '' and k ~= 'x' then r = '' end
  changes[at] = {entry[1], w, k, r, s}
end
return {'ok', life, last, about, changes}
"""

RUNS = """
-- ARGV: most bytes of tokens, most chunks, most bytes of a description, most bytes of the answer, names
-- Answers for as many of the names as the bytes allow, one at least: description, tokens and spans of a run, nothing
-- where there is none, and one word where it is not as a hub writes it.
local runs, nbytes = {}, 0
for at = 5, #ARGV do
  local run, tok = key('run:' .. ARGV[at]), key('tok:' .. ARGV[at])
  local kinds, found = kind_of('run:' .. ARGV[at]) .. kind_of('tok:' .. ARGV[at]), {'odd'}
  if kinds == 'nonenone' then
    found = {}
  elseif kinds == 'hashstring' and redis.call('STRLEN', tok) <= tonumber(ARGV[1])
      and redis.call('HLEN', run) <= tonumber(ARGV[2]) + 2 and redis.call('HEXISTS', run, 'a') == 1
      and redis.call('HSTRLEN', run, 'a') <= tonumber(ARGV[3]) then
    local spans = {}
    for _, field in ipairs(redis.call('HKEYS', run)) do
      if #field == 8 then spans[#spans + 1] = field end
    end
    found = {redis.call('HGET', run, 'a'), redis.call('GET', tok), table.concat(spans)}
    nbytes = nbytes + #found[2] + #found[3]
  end
  runs[#runs + 1] = found
  if nbytes > tonumber(ARGV[4]) then break end
end
return runs
"""

RECORDS = """
-- ARGV: the change that counts as the time of this use, most bytes of a record, then a name and a span each
-- Answers with the records, and nothing of one that is too long. A full Redis refuses to note a use: that costs the
-- order of use alone.
local records = {}
for at = 3, #ARGV, 2 do
  local run, span, record = key('run:' .. ARGV[at]), ARGV[at + 1], false
  if kind_of('run:' .. ARGV[at]) == 'hash' then
    record = redis.call('HSTRLEN', run, span) > tonumber(ARGV[2]) and '' or redis.call('HGET', run, span)
  end
  records[#records + 1] = record
  if ARGV[at] ~= ARGV[at - 2] then redis.pcall('ZADD', key('runs'), 'XX', 'GT', ARGV[1], ARGV[at]) end
end
return records
"""

PUBLISH = """
-- ARGV: incarnation, name, tokens or nothing, description, capacity, log length, spans, then a span and a record each
local name, capacity, most = ARGV[2], tonumber(ARGV[5]), tonumber(ARGV[6])
if not redis.call('ZSCORE', key('members'), ARGV[1]) then return redis.error_reply('FENCED hub') end
redis.call('ZADD', key('members'), now(), ARGV[1])
mend_run(name)
local run, tokens, replaced = key('run:' .. name), key('tok:' .. name), {}
if #ARGV[3] > 0 then
  local before = redis.call('STRLEN', tokens) + redis.call('HSTRLEN', run, 'a')
  redis.call('SET', tokens, ARGV[3])
  redis.call('HSET', run, 'a', ARGV[4])
  add_bytes(name, #ARGV[3] + #ARGV[4] - before)
elseif redis.call('EXISTS', run) == 0 then
  return redis.error_reply('NORUN run')
end
for at = 8, #ARGV, 2 do
  local old = redis.call('HGET', run, ARGV[at])
  local n = size_of(ARGV[at + 1])
  if old then
    replaced[#replaced + 1] = old
    n = n - size_of(old)
  end
  redis.call('HSET', run, ARGV[at], ARGV[at + 1])
  add_bytes(name, n)
end
local seq = note_change(ARGV[1], 'p', name, ARGV[7], most)
redis.call('ZADD', key('runs'), seq, name)
while tonumber(redis.call('GET', key('bytes'))) > capacity do
  local oldest = redis.call('ZRANGE', key('runs'), 0, 0)[1]
  if oldest == nil or oldest == name then break end
  mend_run(oldest)
  local spans = ''
  local fields = redis.call('HGETALL', key('run:' .. oldest))
  for at = 1, #fields, 2 do
    if #fields[at] == 8 then
      replaced[#replaced + 1] = fields[at + 1]
      spans = spans .. fields[at]
    end
  end
  forget_run(oldest)
  if spans ~= '' then note_change('', 'd', oldest, spans, most) end
end
return replaced
"""

DROP = """
-- ARGV: incarnation, name, log length, then a span and its record, or nothing for any record
local name, spans, dropped = ARGV[2], '', {}
local run = key('run:' .. name)
local fields = {}
mend_run(name)
for at = 4, #ARGV, 2 do
  local record = redis.call('HGET', run, ARGV[at])
  if record and (ARGV[at + 1] == '' or ARGV[at + 1] == record) then
    dropped[#dropped + 1] = record
    fields[#fields + 1] = ARGV[at]
    spans = spans .. ARGV[at]
  end
end
if spans == '' then return {} end
note_change(ARGV[1], 'd', name, spans, tonumber(ARGV[3]))
for at = 1, #fields do
  redis.call('HDEL', run, fields[at])
  add_bytes(name, -size_of(dropped[at]))
end
if redis.call('HLEN', run) == 2 then forget_run(name) end
return dropped
"""

ANNOUNCE = """
-- ARGV: incarnation, what is deleted, log length
return note_change(ARGV[1], 'x', ARGV[2], '', tonumber(ARGV[3]))
"""

LEAVE = """
return redis.call('ZREM', key('members'), ARGV[1])
"""
