"""python -m lockstep.audit.call FILE FUNCTION: call a function of a file; the script that `assert_in_lockstep` audits.

The file runs under another name than `__main__`, so that only the function is called.
"""

import runpy
import sys

if __name__ == "__main__":
    file, function = sys.argv[1:3]
    runpy.run_path(file, run_name="lockstep_audit_test")[function]()
