/* A switch with latency, for kernels without netem: packets of one host's tun device go into another's, later.

   relay LATENCY_US BITS_PER_US FD...   the tun device of host 0, 1, ..., which is 10.77.0.1, 10.77.0.2, ...; -1 of one
                                        that is cut off

   A packet leaves for its host LATENCY_US after it came, and not before the ones ahead of it have left at the rate of
   the link. What would wait longer than 50 ms for that is dropped, as by tc tbf. */
#include <poll.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

enum { HOSTS = 64, LARGEST = 65536, QUEUE_NS = 50000000 };
struct packet { struct packet *next; int64_t due; int size; char bytes[]; };
struct link { struct packet *first, *last; int64_t free; };

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

int main(int count, char **words) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_TIMERSLACK, 1); /* else the kernel adds 50 us to every wait */
    int64_t latency = atof(words[1]) * 1000;
    double rate = atof(words[2]) / 1000; /* bits a nanosecond */
    int hosts = count - 3;
    static struct link links[HOSTS];
    static struct pollfd fds[HOSTS];
    static char bytes[LARGEST];
    if (hosts > HOSTS) return 2;
    for (int h = 0; h < hosts; h++) fds[h] = (struct pollfd){atoi(words[3 + h]), POLLIN, 0};
    for (;;) {
        int64_t next = -1, t = now();
        for (int h = 0; h < hosts; h++) {
            struct link *l = &links[h];
            for (struct packet *p; (p = l->first) && p->due <= t; free(p)) {
                if (fds[h].fd >= 0 && write(fds[h].fd, p->bytes, p->size) < 0) {} /* a lost packet is TCP's affair */
                l->first = p->next;
            }
            if (l->first && (next < 0 || l->first->due < next)) next = l->first->due;
        }
        int64_t wait = next < 0 ? 0 : next - t;
        struct timespec until = {wait / 1000000000, wait % 1000000000};
        if (ppoll(fds, hosts, next < 0 ? NULL : &until, NULL) <= 0) continue;
        for (int h = 0; h < hosts; h++) {
            int size = fds[h].revents & POLLIN ? read(fds[h].fd, bytes, LARGEST) : 0;
            int to = (unsigned char)bytes[19] - 1; /* the last byte of IPv4's destination */
            if (size < 20 || bytes[0] >> 4 != 4 || to < 0 || to >= hosts) continue;
            struct link *l = &links[to];
            int64_t at = now(), begin = at > l->free ? at : l->free;
            if (begin - at > QUEUE_NS) continue;
            struct packet *p = malloc(sizeof *p + size);
            l->free = begin + (int64_t)(size * 8 / rate);
            *p = (struct packet){NULL, l->free + latency, size};
            memcpy(p->bytes, bytes, size);
            if (l->first) l->last->next = p; else l->first = p;
            l->last = p;
        }
    }
}
