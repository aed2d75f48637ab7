/* The guest's first process: runs every line of /list (a folder, then a program and its arguments), and says how each
 * ended. What it prints goes to the serial port. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

static int start(char *line)
{
    char *words[16];
    int count = 0;
    for (char *word = strtok(line, " \n"); word && count < 15; word = strtok(0, " \n")) {
        words[count++] = word;
    }
    words[count] = 0;
    if (count < 2 || chdir(words[0]) != 0) {
        return 2;
    }
    execv(words[1], words + 1);
    return 2;
}

int main(void)
{
    mount("proc", "/proc", "proc", 0, 0);
    FILE *list = fopen("/list", "r");
    char line[512];
    int failures = 0, all = 0;
    setvbuf(stdout, 0, _IONBF, 0);
    printf("guest is up\n");
    while (list && fgets(line, sizeof(line), list)) {
        char shown[512];
        strcpy(shown, line);
        shown[strcspn(shown, "\n")] = 0;
        const pid_t child = fork();
        if (child == 0) {
            _exit(start(line));
        }
        int status = 0;
        waitpid(child, &status, 0);
        ++all;
        if (status != 0) {
            ++failures;
            printf("FAILED: %s: %s %d\n", shown, WIFSIGNALED(status) ? "signal" : "status",
                   WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
        }
    }
    printf("guest is done: %d of %d failed\n", failures, all);
    for (;;) {
        pause();
    }
}
