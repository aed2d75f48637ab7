/* Tiles without asking: ends well when the system stops that, as it must, so that asking is shown to be needed. */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

int main(void)
{
    const pid_t child = fork();
    if (child == 0) {
        static const struct {
            uint8_t kind, start, none[14];
            uint16_t bytes[16];
            uint8_t rows[16];
        } __attribute__((aligned(64))) tiles = {1, 0, {0}, {64}, {16}};
        __asm__ volatile("ldtilecfg %0\n\ttilezero %%tmm0\n\ttilerelease" ::"m"(tiles));
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    const int stopped = WIFSIGNALED(status) && WTERMSIG(status) == SIGILL;
    printf("tiles without permission: %s\n", stopped ? "stopped by the system, as they must be" : "NOT stopped");
    return !stopped;
}
