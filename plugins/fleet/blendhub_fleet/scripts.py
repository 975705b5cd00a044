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
"""

_COMMON = """
local p = KEYS[1]
local function key(name) return p .. name end
local function size_of(record) return tonumber(string.match(record, '^(%d+):')) end
local function now()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
local function add_bytes(name, n)
  redis.call('HINCRBY', key('run:' .. name), 'n', n)
  redis.call('INCRBY', key('bytes'), n)
end
local function note_change(writer, kind, name, spans, most)
  local seq = redis.call('INCR', key('seq'))
  redis.call('XADD', key('log'), 'MAXLEN', '=', most, string.format('%d-0', seq),
    'w', writer, 'k', kind, 'r', name, 's', spans)
  return seq
end
local function forget_run(name)
  local n = redis.call('HGET', key('run:' .. name), 'n')
  if n then redis.call('DECRBY', key('bytes'), n) end
  redis.call('DEL', key('run:' .. name), key('tok:' .. name))
  redis.call('ZREM', key('runs'), name)
end
"""

FOLLOW = (
    _COMMON
    + """
-- ARGV: incarnation, 1 to join, which life of Redis, the last change known, most entries, ms after which a hub is dead
local known, t = tonumber(ARGV[4]), now()
redis.call('ZREMRANGEBYSCORE', key('members'), '-inf', t - tonumber(ARGV[6]))
if ARGV[2] ~= '1' and not redis.call('ZSCORE', key('members'), ARGV[1]) then return {'fenced'} end
redis.call('ZADD', key('members'), t, ARGV[1])
redis.call('SET', key('epoch'), ARGV[1], 'NX')
local life = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)') .. redis.call('GET', key('epoch'))
local last = tonumber(redis.call('GET', key('seq')) or '0')
local about = {redis.call('ZCARD', key('members')), tonumber(redis.call('GET', key('bytes')) or '0')}
local oldest = redis.call('XRANGE', key('log'), '-', '+', 'COUNT', 1)
local first = last + 1
if #oldest > 0 then first = tonumber(string.match(oldest[1][1], '^(%d+)')) end
if ARGV[3] ~= life or known > last or known + 1 < first then return {'lost', life, last, about} end
local from = string.format('%d-0', known + 1)
return {'ok', life, last, about, redis.call('XRANGE', key('log'), from, '+', 'COUNT', ARGV[5])}
"""
)

PUBLISH = (
    _COMMON
    + """
-- ARGV: incarnation, name, tokens or nothing, description, capacity, log length, spans, then a span and a record each
local name, capacity, most = ARGV[2], tonumber(ARGV[5]), tonumber(ARGV[6])
if not redis.call('ZSCORE', key('members'), ARGV[1]) then return redis.error_reply('FENCED hub') end
redis.call('ZADD', key('members'), now(), ARGV[1])
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
  local spans = ''
  local fields = redis.call('HGETALL', key('run:' .. oldest))
  for at = 1, #fields, 2 do
    if #fields[at] == 8 then
      replaced[#replaced + 1] = fields[at + 1]
      spans = spans .. fields[at]
    end
  end
  forget_run(oldest)
  note_change('', 'd', oldest, spans, most)
end
return replaced
"""
)

DROP = (
    _COMMON
    + """
-- ARGV: incarnation, name, log length, then a span and its record, or nothing for any record
local name, spans, dropped = ARGV[2], '', {}
local run = key('run:' .. name)
local fields = {}
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
)

LEAVE = (
    _COMMON
    + """
return redis.call('ZREM', key('members'), ARGV[1])
"""
)
