// SPDX-License-Identifier: MIT
// autograd/anomaly.c -- the script's lines of recorded operators, in a list ordered by the nodes' sequence numbers, and
// the check of a node's gradients.
#include <stdio.h>

#include "autograd/anomaly.h"

static struct {
    struct {
        uint64_t seq;
        const char *line;  // interned
    } * lines;
    int n, cap;
} noted;

void ms_set_anomaly(int what)
{
    ms__anomaly = what < 0 ? 0 : what > 2 ? 2 : what;
    if (ms__anomaly) return;
    free(noted.lines);
    noted.lines = NULL;
    noted.n = noted.cap = 0;
}

ms_status ms_anomaly_line(ms_id id, const char *line)
{
    const ms_tensor *t = ms__tensor(id);
    if (!t) return ms__failure();
    uint64_t seq = t->node ? t->node->seq : 0;
    if (!ms__anomaly || !seq || (noted.n && noted.lines[noted.n - 1].seq >= seq)) return MS_OK;
    MS_TRY(ms__grow(&noted.lines, &noted.cap, noted.n, sizeof *noted.lines, "detect_anomaly", "lines"));
    noted.lines[noted.n].seq = seq;
    noted.lines[noted.n++].line = ms__intern(line);
    return MS_OK;
}

// The script's line that recorded a node; NULL if it is not known. One call of a script may record several nodes, and
// only the last of them is given the call's line, so this is the line of the first node at or after n that has one.
static const char *script_line_of(const ms_node *n)
{
    int low = 0, high = noted.n;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (noted.lines[middle].seq < n->seq) low = middle + 1;
        else high = middle;
    }
    return low < noted.n ? noted.lines[low].line : NULL;
}

ms_status ms__anomaly_gradients(const ms_node *n, ms_tensor *const *gin)
{
    char what[192];
    snprintf(what, sizeof what, "backward of %s: the gradient of %sargument",
             n->op ? ms__op_title(n->op->name) : "a function or module", n->n_in > 1 ? "" : "its ");
    ms_values v = { .what = what,
                    .of_inputs = "the gradients of its results",
                    .n_in = n->n_out,
                    .in = n->gout,
                    .n_out = n->n_in,
                    .out = gin };
    ms_status st = ms__anomaly_check(&v);
    const char *line = st == MS_OK ? NULL : script_line_of(n);
    if (!line) return st;
    char text[2048];
    snprintf(text, sizeof text, "%s; its forward ran at %s", ms_error(), line);
    return ms__fail(st, "%s", text);
}
