/* A device's limit: a loop over io_uring that reads blocks and does nothing else. Built by tiers_blocks.py. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/io_uring.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* Reads `count` blocks of an open file at `places`, `depth` at a time. Returns 0, or errno. If `took` is not null, it
   waits for all after each `depth` of them, and writes down the seconds of each such batch. */
int read_blocks(int fd, int64_t block, const int32_t* places, int64_t count, int depth, double* took) {
  struct io_uring_params params = {0};
  params.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
  const int ring = syscall(__NR_io_uring_setup, depth, &params);
  if (ring < 0) return errno;
  const size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
  const size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
  const size_t bytes = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
  const size_t sqe_bytes = params.sq_entries * sizeof(struct io_uring_sqe);
  const int rights = PROT_READ | PROT_WRITE;
  char* rings = mmap(0, bytes, rights, MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQ_RING);
  struct io_uring_sqe* sqes = mmap(0, sqe_bytes, rights, MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQES);
  char* buffers = mmap(0, depth * block, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (rings == MAP_FAILED || sqes == MAP_FAILED || buffers == MAP_FAILED) return ENOMEM;
  unsigned *sq_tail = (unsigned*)(rings + params.sq_off.tail), *sq_array = (unsigned*)(rings + params.sq_off.array);
  unsigned *cq_head = (unsigned*)(rings + params.cq_off.head), *cq_tail = (unsigned*)(rings + params.cq_off.tail);
  const unsigned sq_mask = params.sq_entries - 1, cq_mask = params.cq_entries - 1;
  struct io_uring_cqe* cqes = (struct io_uring_cqe*)(rings + params.cq_off.cqes);

  int error = 0, free_count = depth, *free = malloc(depth * sizeof(int));
  for (int slot = 0; slot < depth; ++slot) free[slot] = slot;
  unsigned added = 0;
  double since = now();
  for (int64_t begun = 0, ended = 0, end = took ? depth : count; ended < count && !error;) {
    for (; free_count && begun < end && begun < count; ++begun, ++added) {
      const unsigned tail = *sq_tail, index = tail & sq_mask;
      const int slot = free[--free_count];
      memset(&sqes[index], 0, sizeof sqes[index]);
      sqes[index].opcode = IORING_OP_READ;
      sqes[index].fd = fd;
      sqes[index].addr = (uintptr_t)(buffers + slot * block);
      sqes[index].len = block;
      sqes[index].off = places[begun] * block;
      sqes[index].user_data = slot;
      sq_array[index] = index;
      __atomic_store_n(sq_tail, tail + 1, __ATOMIC_RELEASE);
    }
    const int sent = syscall(__NR_io_uring_enter, ring, added, 1, IORING_ENTER_GETEVENTS, 0, 0);
    if (sent > 0) added -= sent;
    unsigned head = *cq_head;
    const unsigned tail = __atomic_load_n(cq_tail, __ATOMIC_ACQUIRE);
    for (; head != tail; ++head, ++ended) {
      if (cqes[head & cq_mask].res != block) error = cqes[head & cq_mask].res < 0 ? -cqes[head & cq_mask].res : EIO;
      free[free_count++] = cqes[head & cq_mask].user_data;
    }
    __atomic_store_n(cq_head, head, __ATOMIC_RELEASE);
    if (took && ended == end) {
      const double then = now();
      took[end / depth - 1] = then - since;
      since = then;
      end += depth;
    }
  }
  close(ring);
  munmap(rings, bytes), munmap(sqes, sqe_bytes), munmap(buffers, depth * block);
  return error;
}
