-- Finish tasks: acknowledge each, and only where that is the first time, store its result and move it to its next stage.
-- From `tasks` that is the stream of its teacher, or `samples`, where it is done; from a teacher's it is `samples`.
-- A second finisher (a process taken for dead that was not, or a call repeated because its reply was lost)
-- finds the task gone and changes nothing. Acknowledging and deleting always happen in one script, so the call that
-- finds the entry is the first; acknowledging and deleting many at once is cheaper than one by one.
-- The result is stored under the entry's own id, whatever the process says: the sampler waits for that id.
--
-- KEYS: stream, samples, counters, dead, prefixes of payload keys, of previous-response keys, of teachers' streams
-- ARGV: group, then six for each task: entry id, header, payload or '', prompt id or '', dead letter or '', teacher or ''
local stream, samples, counters, dead, payloads, previous, scoring = unpack(KEYS)

local function id_of(entry)
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'id' then return entry[2][i + 1] end
  end
  return ''
end

redis.call('HDEL', counters, '') -- a full Redis goes on with a script whose first write frees memory
local first, seen, to_teachers = {}, {}, 0
for i = 2, #ARGV, 6 do
  local entry, header, payload, prompt, letter, teacher = unpack(ARGV, i, i + 5)
  local leased = not seen[entry] and redis.call('XRANGE', stream, entry, entry)[1]
  if leased then
    local id = id_of(leased)
    seen[entry] = true
    first[#first + 1] = entry
    if payload ~= '' then
      redis.call('SET', payloads .. id, payload)
      if prompt ~= '' then redis.call('SET', previous .. prompt, payload) end
    end
    if teacher ~= '' then to_teachers = to_teachers + 1 end
    redis.call('XADD', teacher == '' and samples or scoring .. teacher, '*', 'id', id, 'header', header)
    if letter ~= '' then
      redis.call('XADD', dead, 'MAXLEN', '~', '10000', '*', 'letter', letter)
    end
  end
end
if #first > 0 then
  redis.call('XDEL', stream, unpack(first))
  redis.call('XACK', stream, ARGV[1], unpack(first))
end
redis.call('HINCRBY', counters, 'finished', #first - to_teachers)
redis.call('HINCRBY', counters, 'finished_twice', (#ARGV - 1) / 6 - #first)
if to_teachers > 0 then redis.call('HINCRBY', counters, 'to_teachers', to_teachers) end
return #first
