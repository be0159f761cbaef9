// SPDX-License-Identifier: MIT
// comm/script/dist.c -- start and end of the job, and settings, as scripts ask for them.
#include "base/trace.h"
#include "comm/issue/issue.h"
#include "comm/job/job.h"
#include "comm/movers/mover.h"
#include "comm/world/message.h"

ms_status ms_dist_init(const char *backend, double timeout)
{
    if (!(timeout >= 0))
        return ms__fail(MS_EINVAL, "dist.init: timeout is %g, expected a number of seconds, 0 (unchanged) or more",
                        timeout);
    bool was = ms__world.up;
    MS_TRY(ms__comm_start(backend, timeout));
    if (timeout > 0) ms__world.timeout = timeout;
    if (was) return MS_OK;
    MS_TRY(ms__groups_start());
    return ms__movers_join(ms__group_world());
}

int ms_dist_is_initialized(void) { return ms__world.up; }

void ms_dist_finalize(void)
{
    ms__streams_drain();
    ms__movers_stop();
    ms__comm_stop();
}

const char *ms_dist_backend(void) { return ms__world.transport->name; }

int ms_dist_local_rank(void) { return ms__world.local_rank; }

int ms_dist_rank(double group)
{
    ms_group *g = ms__group_by_id(group);
    return g ? g->me : -2;
}

int ms_dist_size(double group)
{
    ms_group *g = ms__group_by_id(group);
    return g ? g->n : -2;
}

int ms_dist_member(double group, int k)
{
    ms_group *g = ms__group_by_id(group);
    return g && k >= 0 && k < g->n ? g->ranks[k] : -1;
}

void ms_dist_set_timeout(double seconds)
{
    if (seconds > 0) ms__world.timeout = seconds;
}

void ms_dist_set_step(double step)
{
    ms__world.step = (int64_t)step;
    ms__trace_step(ms__world.step);
}

void ms_dist_set_delay(int op, double seconds)
{
    for (int k = 0; k < OPS; k++)
        if (op < 0 || op == k) ms__comm_delays[k] = seconds;
}

ms_status ms_dist_measure_clock(void) { return ms__world.nodes > 1 ? ms__clock_measure() : MS_OK; }

void ms_dist_take_clock(void) { ms__clock_take(); }

ms_status ms_dist_mpi_own(int op, void *out, const void *in, double count)
{
    if (!ms__world.transport->own)
        return ms__fail(MS_EUNSUPPORTED,
                        "ms_dist_mpi_own: this process is not a rank of an MPI job; use mpirun or srun");
    ms__transport_lock();
    int rc = ms__world.transport->own(op, out, in, (size_t)count);
    ms__transport_unlock();
    return rc == 0 ? MS_OK : ms__fail(MS_ECOMM, "ms_dist_mpi_own: MPI failed with error code %d", rc);
}
