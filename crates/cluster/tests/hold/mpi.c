/* An MPI library whose rank QUADRIGA_TEST_HOLD_RANK stops for ever when it calls the function that QUADRIGA_TEST_HOLD names: all of its
 * threads stop, as with SIGSTOP from outside. Everything else is the library's that it is linked with. Handles are pointers or integers;
 * both are passed on as they come, in a register. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

static void hold(const char *function) {
    const char *held = getenv("QUADRIGA_TEST_HOLD"), *rank = getenv("QUADRIGA_TEST_HOLD_RANK");
    const char *own = getenv("OMPI_COMM_WORLD_RANK") ? getenv("OMPI_COMM_WORLD_RANK") : getenv("PMI_RANK");
    if (held && rank && own && strcmp(held, function) == 0 && strcmp(own, rank) == 0) raise(SIGSTOP);
}

int PMPI_Init_thread(void *, void *, int, void *);
int PMPI_Comm_split(void *, int, int, void *);
int PMPI_Ibarrier(void *, void *);
int PMPI_Finalize(void);

int MPI_Init_thread(void *arguments, void *values, int wanted, void *level) {
    hold("MPI_Init_thread");
    return PMPI_Init_thread(arguments, values, wanted, level);
}

int MPI_Comm_split(void *communicator, int color, int key, void *made) {
    hold("MPI_Comm_split");
    return PMPI_Comm_split(communicator, color, key, made);
}

int MPI_Ibarrier(void *communicator, void *request) {
    hold("MPI_Ibarrier");
    return PMPI_Ibarrier(communicator, request);
}

int MPI_Finalize(void) {
    hold("MPI_Finalize");
    return PMPI_Finalize();
}
