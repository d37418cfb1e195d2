-- Take over tasks of generators whose heartbeat has stopped.
--
-- A call looks at a limited number of leases and leaves a cursor, from which the next call of whichever generator goes on:
-- together they pass all leases again and again, however many live ones stand before a dead one.
--
-- KEYS: tasks, takeover
-- ARGV: group, consumer, silence in ms, most tasks, how many leases to look at, name of the stream
-- Returns: 1 if the search has come to the end, and (entry id, fields, times delivered) of each task
local tasks, takeover = KEYS[1], KEYS[2]
local group, consumer, silence, most, look, name = unpack(ARGV)
if redis.call('EXISTS', tasks) == 0 then return {1, {}} end -- an evaluation that is over
local at, taken = redis.call('HGET', takeover, name) or '0-0', {}
local looked = 0
repeat
  local count = tonumber(most) - #taken
  local reply = redis.call('XAUTOCLAIM', tasks, group, consumer, silence, at, 'COUNT', count)
  at = reply[1]
  looked = looked + 10 * count -- as many as XAUTOCLAIM looks at, at most
  for _, entry in ipairs(reply[2]) do
    if entry and entry[2] then
      local lease = redis.call('XPENDING', tasks, group, entry[1], entry[1], 1)[1]
      taken[#taken + 1] = {entry[1], entry[2], lease[4]}
    end
  end
until at == '0-0' or #taken >= tonumber(most) or looked >= tonumber(look)
redis.call('HSET', takeover, name, at)
return {at == '0-0' and 1 or 0, taken}
