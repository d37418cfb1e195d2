-- Finish tasks: acknowledge each, and only where that is the first time, store its result.
-- A second finisher (a generator taken for dead that was not, or a call repeated because its reply was lost)
-- finds the task gone and changes nothing. Acknowledging and deleting always happen in one script, so whoever
-- deletes the entry is the first; acknowledging many at once is cheaper than one by one.
--
-- KEYS: tasks, samples, counters, dead, prefix of payload keys, prefix of previous-response keys
-- ARGV: group, then six for each task: entry id, task id, header, payload or '', prompt id or '', dead letter or ''
local tasks, samples, counters, dead, payloads, previous = unpack(KEYS)
local first = {}
for i = 2, #ARGV, 6 do
  local entry, id, header, payload, prompt, letter = unpack(ARGV, i, i + 5)
  if redis.call('XDEL', tasks, entry) == 1 then
    first[#first + 1] = entry
    if payload ~= '' then
      redis.call('SET', payloads .. id, payload)
      if prompt ~= '' then redis.call('SET', previous .. prompt, payload) end
    end
    redis.call('XADD', samples, '*', 'id', id, 'header', header)
    if letter ~= '' then
      redis.call('XADD', dead, 'MAXLEN', '~', '10000', '*', 'letter', letter)
    end
  end
end
if #first > 0 then redis.call('XACK', tasks, ARGV[1], unpack(first)) end
redis.call('HINCRBY', counters, 'finished', #first)
redis.call('HINCRBY', counters, 'finished_twice', (#ARGV - 1) / 6 - #first)
return #first
