// SPDX-License-Identifier: MIT
// base/plugin.h -- where the engine finds the libraries that it loads on first use.
#ifndef MS_PLUGIN_H
#define MS_PLUGIN_H

#include <stddef.h>

// Writes the path of a plugin: in moonshard/ beside the engine, as in an installation, or else beside the engine, as in
// a build folder.
void ms__plugin_path(char *path, size_t n, const char *name);

#endif
