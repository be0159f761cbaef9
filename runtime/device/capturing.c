// SPDX-License-Identifier: MIT
// device/capturing.c -- which captured step is being recorded.
#include <stdarg.h>
#include <stdio.h>

#include "device/capture.h"

ms_captured *ms__capturing, *ms__recording;
ms_pins *ms__pinning;

ms_captured *ms__capture_suspend(void)
{
    ms_captured *c = ms__capturing;
    ms__capturing = NULL;
    ms__pinning = NULL;
    return c;
}

void ms__capture_resume(ms_captured *c)
{
    ms__capturing = c;
    ms__pinning = c ? c->pins : NULL;
}

void ms__capture_no_memory(ms_captured *c)
{
    if (!c->refusal) c->refusal = strdup("captured step: no memory for the list of its work");
}

ms_status ms__capture_refuse(const char *fmt, ...)
{
    char text[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    ms_status st = ms__fail(MS_ESTATE, "captured step: %s", text);
    ms_captured *c = ms__recording;
    if (c && !c->refusal) c->refusal = strdup(ms_error());
    return st;
}
