-- The learner's only way to change the run: it announces a version, where its weights are, and frees batches.
--
-- The epoch fences off a learner that was replaced while it stood still: it finds a higher one and changes nothing. A
-- lower one means that Redis has lost its last writes.
--
-- KEYS: learner, steps, endpoints, batches, counters, payload prefix
-- ARGV: owner, epoch, step or '', steps kept, endpoint or '', group, entry of the newest batch trained on or '', number
-- of batches, entry ids, sample ids
-- Returns: batches released, -1, or -2: Redis lacks that batch; the owner of a higher epoch, or '' where Redis knows no
-- learner
local learner, steps, endpoints, batches, counters, payloads = unpack(KEYS)
local owner, epoch = ARGV[1], tonumber(ARGV[2])
local holder = redis.call('HGET', learner, 'owner')
if not holder then return {-1, ''} end
local newest = tonumber(redis.call('HGET', learner, 'epoch'))
if newest > epoch or (newest == epoch and holder ~= owner) then return {-1, holder} end
if ARGV[7] ~= '' and #redis.call('XRANGE', batches, ARGV[7], ARGV[7]) == 0 then return {-2, ''} end
redis.call('HDEL', learner, '') -- a full Redis goes on with a script whose first write frees memory
if newest < epoch then redis.call('HSET', learner, 'owner', owner, 'epoch', epoch) end

if ARGV[3] ~= '' then redis.call('XADD', steps, 'MAXLEN', '~', ARGV[4], '*', 'step', ARGV[3]) end
if ARGV[5] ~= '' then redis.call('HSET', endpoints, 'weights', ARGV[5]) end
local n, released = tonumber(ARGV[8]), 0
for i = 9, 8 + n do
  redis.call('XACK', batches, ARGV[6], ARGV[i])
  released = released + redis.call('XDEL', batches, ARGV[i])
end
for i = 9 + n, #ARGV, 1000 do
  local keys = {}
  for j = i, math.min(i + 999, #ARGV) do keys[#keys + 1] = payloads .. ARGV[j] end
  redis.call('UNLINK', unpack(keys))
end
if released > 0 then redis.call('HINCRBY', counters, 'batches_released', released) end
return {released, ''}
