"""torchrun, where thousands of modules are loaded.

For every event of its rendezvous it looks up the name of a function by `inspect.stack()`, which
goes through all modules for each of thirty frames: seconds in all. The name is in the frame.
"""

import sys

from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.run import main

if __name__ == "__main__":
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    main()
