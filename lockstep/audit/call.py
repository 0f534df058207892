"""python -m lockstep.audit.call FILE FUNCTION: call a function of a file, for `assert_in_lockstep` to audit."""

import runpy
import sys

if __name__ == "__main__":
    file, function = sys.argv[1:3]
    runpy.run_path(file, run_name="lockstep_audit_test")[function]()
