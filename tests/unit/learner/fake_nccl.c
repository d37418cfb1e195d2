/* libnccl's calls over host memory, for members of one group that are threads of one process. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char internal[128]; } id_t128;
typedef struct { id_t128 id; int size; float sum; const void *source; pthread_barrier_t barrier; } group_t;
typedef struct { group_t *group; int rank; } comm_t;

static group_t *groups[16];
static int made;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

const char *ncclGetErrorString(int code) { return code == 5 ? "invalid usage" : "unhandled error"; }

int ncclGetUniqueId(id_t128 *id) {
    memset(id, 0, sizeof *id);
    id->internal[127] = (char)(++made);
    return 0;
}

int ncclCommInitRank(comm_t **comm, int size, id_t128 id, int rank) {
    if (rank >= size) return 5;
    pthread_mutex_lock(&lock);
    group_t **group = groups;
    while (*group && memcmp(&(*group)->id, &id, sizeof id)) group++;
    if (!*group) {
        *group = calloc(1, sizeof(group_t));
        (*group)->id = id;
        (*group)->size = size;
        pthread_barrier_init(&(*group)->barrier, NULL, size);
    }
    pthread_mutex_unlock(&lock);
    *comm = malloc(sizeof(comm_t));
    (*comm)->group = *group;
    (*comm)->rank = rank;
    pthread_barrier_wait(&(*group)->barrier);
    return 0;
}

int ncclAllReduce(const float *in, float *out, size_t count, int type, int op, comm_t *comm, void *stream) {
    if (type != 7 || op != 0 || count != 1) return 5;
    pthread_mutex_lock(&lock);
    comm->group->sum += *in;
    pthread_mutex_unlock(&lock);
    pthread_barrier_wait(&comm->group->barrier);
    *out = comm->group->sum;
    return 0;
}

int ncclBroadcast(const void *in, void *out, size_t count, int type, int root, comm_t *comm, void *stream) {
    if (type != 1) return 5;
    if (comm->rank == root) comm->group->source = in;
    pthread_barrier_wait(&comm->group->barrier);
    if (comm->rank != root) memcpy(out, comm->group->source, count);
    pthread_barrier_wait(&comm->group->barrier);
    return 0;
}

int ncclCommGetAsyncError(comm_t *comm, int *code) { *code = 0; return 0; }

int ncclCommAbort(comm_t *comm) { free(comm); return 0; }
