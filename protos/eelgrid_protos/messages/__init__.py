"""The contract's vocabulary: everything that crosses a process boundary, as frozen values."""

from eelgrid_protos.messages.agent_stream import *  # noqa: F403
from eelgrid_protos.messages.audit import *  # noqa: F403
from eelgrid_protos.messages.caller import *  # noqa: F403
from eelgrid_protos.messages.energy import *  # noqa: F403
from eelgrid_protos.messages.ledger import *  # noqa: F403
from eelgrid_protos.messages.moves import *  # noqa: F403
from eelgrid_protos.messages.node import *  # noqa: F403
from eelgrid_protos.messages.node_query import *  # noqa: F403
from eelgrid_protos.messages.operator import *  # noqa: F403
from eelgrid_protos.messages.partition import *  # noqa: F403
from eelgrid_protos.messages.plan import *  # noqa: F403
from eelgrid_protos.messages.policy import *  # noqa: F403
from eelgrid_protos.messages.profile import *  # noqa: F403
from eelgrid_protos.messages.promise import *  # noqa: F403
from eelgrid_protos.messages.promises import *  # noqa: F403
from eelgrid_protos.messages.reading import *  # noqa: F403
from eelgrid_protos.messages.spending import *  # noqa: F403
from eelgrid_protos.messages.whatif import *  # noqa: F403
from eelgrid_protos.messages.workload import *  # noqa: F403
