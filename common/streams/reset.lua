-- Delete the state of a run, which then starts from its newest checkpoint. The groups stay, and so does the learner's
-- epoch, without an owner: a learner that is alive must start again.
--
-- KEYS: lease, learner, streams with a group, then the other keys to remove
-- ARGV: owner, lease in ms, then the group of each of these streams
-- Returns: 1, or -1 if another sampler has the lease
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return -1 end
redis.call('DEL', KEYS[1]) -- a full Redis continues a script whose first write frees memory
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
for i = 3, #KEYS do redis.call('UNLINK', KEYS[i]) end
for i = 3, #ARGV do redis.call('XGROUP', 'CREATE', KEYS[i], ARGV[i], '0', 'MKSTREAM') end
if redis.call('EXISTS', KEYS[2]) == 1 then redis.call('HSET', KEYS[2], 'owner', '') end
return 1
