/* harness/home.h - files of the source tree, from whatever folder the program is started in. */
#ifndef DP_HOME_H
#define DP_HOME_H
#ifdef __cplusplus
extern "C" {
#endif
/* name as it is where this folder is the source tree (or nothing better is known), else below the folder above the program's own (build/deltaproof). Not to be freed. */
const char *dp_home(const char *name);
/* The interpreter of the report: DP_PYTHON, else what `make setup` chose (the file `python` beside the program), else python3. */
const char *dp_python(void);
#ifdef __cplusplus
}
#endif
#endif
