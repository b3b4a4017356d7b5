/* harness/commands/report_page.h - the page and the figures of a record. */
#ifndef DP_REPORT_PAGE_H
#define DP_REPORT_PAGE_H

/* Runs reports/report.py, or the script that DP_REPORT names, on the folder of a record. Returns
 * its exit status, 2 where it cannot be run or is killed. Errors are printed on standard error. */
int dp_report_page(const char *folder);

#endif
