/* harness/base/home.h - where the cases and reports/ of this program lie, whatever folder it is
 * started in.
 *
 * Code runs from that tree (reports/), so nothing of the present folder can replace it. The tree is
 * the folder above the build folder of the program's own file. An installed PREFIX/bin/deltaproof
 * has PREFIX/share/deltaproof, else the source tree that was compiled in. A tree that every user
 * may write to is never used.
 */
#pragma once

/* The path of `name` in the tree; not to be freed. There need be no such file. */
const char *dp_home(const char *name);

/* The folder of deltaproof_subject.h: include/ beside the program's own bin/, as `make install` and
 * a wheel have it, else harness/ of the tree. */
const char *dp_home_include(void);

/* Folder of computed truths where no option names one. A source tree has build/cache, an installed
 * program the user's folder: $XDG_CACHE_HOME/deltaproof, else ~/.cache/deltaproof. NULL: neither is
 * set.
 */
const char *dp_home_cache(void);

/* The interpreter of the report: DP_PYTHON, else what `make setup` chose (the file `python` in the
 * build folder, or in the installed tree), else python3. */
const char *dp_python(void);

/* Arguments between the interpreter and its script. Isolated mode takes no code from the present
 * folder, the user's own packages or PYTHON* variables. */
#define DP_PYTHON_ISOLATED "-I", "-B"
