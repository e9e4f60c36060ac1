/* Makes each sync of the disk take SLOW_DISK_MS longer in the process that is started with this library before
 * the system's. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

static int sync_late(const char *name, int file) {
    usleep(1000 * atoi(getenv("SLOW_DISK_MS")));
    return ((int (*)(int))dlsym(RTLD_NEXT, name))(file);
}

int fdatasync(int file) { return sync_late("fdatasync", file); }
int fsync(int file) { return sync_late("fsync", file); }
