// SPDX-License-Identifier: MIT
// autograd/backward.h -- the struct of a run, shared by run.c (stack, tasks, events), next.c, backward.c (nodes) and
// leaf.c.
#ifndef MS_BACKWARD_H
#define MS_BACKWARD_H

#include <stdio.h>

#include "autograd/graph.h"
#include "base/trace.h"

typedef struct {
    uint64_t seq;
    ms_node *node;
} ms_entry;
typedef struct ms_stacked {
    ms_task t;
    struct ms_stacked *next;
} ms_stacked;
typedef struct {
    ms_node *node;
    int index;
    ms_leaf *leaf;
    ms_tensor *value;
} ms_capture;

// The outer run's state that a nested run saved, for a node (needed, gout) or a leaf (pending, total).
typedef struct ms_aside {
    ms_node *node;
    ms_leaf *leaf;
    ms_run *run;
    bool needed;
    int pending;
    ms_tensor *total, **gout;
    struct ms_aside *next;
} ms_aside;

// The node in progress.
typedef struct {
    ms_node *node;
    int phase, hook_output;  // PHASE_*; the output to whose gradient `hook` belongs
    ms_hook *hook;           // the hook that ran last
    ms_tensor *gin[MS_MAX_IN];
} ms_visit;
// The last event of a run. out: the event waits for the script's answer.
typedef struct {
    bool out;
    int kind;
    ms_id ids[MS_MAX_IN + MS_MAX_OUT];
    ms_tensor *answers[MS_MAX_IN];
    int n_answers;
} ms_asked;
// The script's modes, to be restored after an event.
typedef struct {
    double scope;
    int grad_mode, autocast;
    double rng[2];
} ms_modes;

struct ms_run {
    ms_run *below;
    ms_open_range range;
    bool backward, grad, retain, unused_ok, finished, final_done;
    bool units;  // the run reaches units, so peers take part in its collectives
    // Nodes in ascending order of seq; the last is processed next. Tasks are processed before nodes.
    ms_entry *agenda;
    int n_agenda, cap_agenda;
    ms_stacked *tasks;
    ms_aside *asides;
    ms_leaf **leaves;  // leaves that the run reaches; retained
    int n_leaves, cap_leaves;
    ms_leaf **forwards;  // detached inputs of checkpoints; retained
    int n_forwards, cap_forwards;
    // Roots and recomputed outputs, held to keep the graph alive during the run.
    ms_node **held;
    int n_held, cap_held;
    ms_capture *captures;
    int n_captures;
    ms_visit at;
    ms_asked event;
    ms_modes modes;
};

ms_run_state ms__node_step(ms_run *r, ms_event *ev);  // Processes r->at.node from phase r->at.phase on.

#endif
