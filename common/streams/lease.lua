-- Lease tasks to a generator: those of the open evaluation first, if the generator has the version that answers them.
--
-- One version of the weights answers an evaluation: that of the first generator that asks with a version new enough, and
-- not newer than the sampler knows: such a version was announced to a Redis that has since come back with an older
-- state.
-- Generators with this version keep it until the evaluation is over. Each call of theirs is counted, as a sign that the
-- version still exists.
--
-- A generator joins the holders before it is leased a task, so that others find the tasks it leaves behind.
--
-- KEYS: tasks, state, prefix of pins, holders
-- ARGV: group, consumer, weight version (-1: none that may be kept), most tasks of an evaluation, most training tasks
-- Returns: name of the evaluation that this generator may answer or '', its tasks, training tasks, 1 if Redis did not
-- know of this generator
local tasks, state, pins, holders = unpack(KEYS)
local group, consumer, version = ARGV[1], ARGV[2], tonumber(ARGV[3])

local function read(stream, count)
  if count < 1 then return {} end
  local reply = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', count, 'STREAMS', stream, '>')
  if not reply then return {} end
  -- A list of (stream, entries), or, if scripts speak RESP3 (fakeredis), a map of them, flat.
  return type(reply[1]) == 'table' and reply[1][2] or reply[2] or {}
end

local time = redis.call('TIME')
redis.call('HDEL', state, '') -- a full Redis continues a script whose first write frees memory
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local unknown = redis.call('ZADD', holders, 'NX', now, consumer)

local name, evaluated = redis.call('HGET', state, 'evaluating') or '', {}
if name ~= '' then
  local pin = pins .. name
  local pinned = redis.call('HGET', pin, 'version')
  local oldest, newest = unpack(redis.call('HMGET', state, 'evaluating_from', 'version'))
  if not pinned and version >= tonumber(oldest) and version <= tonumber(newest or version) then pinned = ARGV[3] end
  if pinned and tonumber(pinned) == version then
    evaluated = read(tasks .. ':' .. name, tonumber(ARGV[4]))
    redis.call('HSET', pin, 'version', pinned)
    redis.call('HINCRBY', pin, 'seen', 1)
  else
    name = ''
  end
end
return {name, evaluated, read(tasks, tonumber(ARGV[5]) - #evaluated), unknown}
