"""python -m lockstep.audit.call FILE FUNCTION: call a function of a file; the script that `assert_in_lockstep` audits."""

import runpy
import sys

if __name__ == "__main__":
    file, function = sys.argv[1:3]
    runpy.run_path(file, run_name="lockstep_audit_test")[function]()
