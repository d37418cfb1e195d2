-- Finish tasks: acknowledge each, and only where that acknowledgement is the first, store its result.
-- A second finisher (a generator taken for dead that was not, or a call repeated because its reply was lost)
-- finds nothing to acknowledge and changes nothing.
--
-- KEYS: tasks, samples, counters, dead, prefix of payload keys, prefix of previous-response keys
-- ARGV: group, then six for each task: entry id, task id, header, payload or '', prompt id or '', dead letter or ''
local tasks, samples, counters, dead, payloads, previous = unpack(KEYS)
local group, accepted = ARGV[1], 0
for i = 2, #ARGV, 6 do
  local entry, id, header, payload, prompt, letter = unpack(ARGV, i, i + 5)
  if redis.call('XACK', tasks, group, entry) == 1 then
    redis.call('XDEL', tasks, entry)
    if payload ~= '' then
      redis.call('SET', payloads .. id, payload)
      if prompt ~= '' then redis.call('SET', previous .. prompt, payload) end
    end
    redis.call('XADD', samples, '*', 'id', id, 'header', header)
    if letter ~= '' then
      redis.call('XADD', dead, 'MAXLEN', '~', '10000', '*', 'letter', letter)
    end
    accepted = accepted + 1
  end
end
redis.call('HINCRBY', counters, 'finished', accepted)
redis.call('HINCRBY', counters, 'finished_twice', (#ARGV - 1) / 6 - accepted)
return accepted
