/* harness/base/home.h - the source tree that this program was built from, whatever folder it is
 * started in.
 *
 * Code runs from that tree (reports/), so nothing of the present folder can stand in for it: the
 * tree is the folder above the build folder that the program's own file lies in, else the one that
 * was compiled in; never one that every user may write to.
 */
#ifndef DP_HOME_H
#define DP_HOME_H
#ifdef __cplusplus
extern "C" {
#endif

/* The path of `name` in the tree; not to be freed. There need be no such file. */
const char *dp_home(const char *name);

/* The interpreter of the report: DP_PYTHON, else what `make setup` chose (the file `python` in the
 * build folder), else python3. */
const char *dp_python(void);

/* Arguments that come between the interpreter and its script: isolated mode, which takes no code
 * from the present folder, the user's own packages or PYTHON* variables. */
#define DP_PYTHON_ISOLATED "-I", "-B"

#ifdef __cplusplus
}
#endif
#endif
