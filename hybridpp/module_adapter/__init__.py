"""The one owner of what is put on the user's modules: layers around their forwards, hooks, attributes.

Every other package asks a :class:`ModuleAdapter` (one per model) to put something on a module, and says which
:class:`AdapterLayer` it is. The adapter sets ``module.forward``; nobody else does.

**Layers.** A layer is a function ``run(*bound, inner, /, *args, **kwargs)`` that calls ``inner``, which is the next
layer or the module's own forward. How the layers of a module are nested is data, :data:`ORDER`, and does not depend on
the order of the calls that installed them. Whenever a layer is added or taken off, the module's ``forward`` is composed
anew: nested ``functools.partial`` objects, so a call costs one Python function per layer and no loop. They are
partials and no closures because a deep copy of a model copies partials and what is bound to them, and shares closures:
the copy's forward would run the original.

**Inside and around the hooks.** Calling a module is ``module._call_impl``, which runs its hooks around ``forward``. A
layer that is installed by :meth:`ModuleAdapter.wrap` is inside the hooks, one by :meth:`ModuleAdapter.wrap_call`
around them. Layers that decide whether a module runs at all (stages), or what it finds when it runs (random numbers,
gathered parameters), need both: see :class:`CallRouter`. Of a module that is compiled in place, what is inside the
hooks is compiled, and what is around them is not.

**State of a step.** The model calls its modules itself, so a step cannot pass an argument through them. What a layer
needs to know of the step is in an object that is bound to it, and that the step enters and leaves:
:meth:`CallRouter.active` is such a context. What the backward pass needs of a forward is returned by that forward
(``StageContext`` in ``partition/``) and held by the executor.

**Compiled modules.** ``COMPILE`` is the innermost layer: its ``inner`` is the user's own forward, which is compiled at
the first call. What is put on modules inside of it is compiled with it (:meth:`ModuleAdapter.expect_compiled`).

**Seams.** One layer of the order is used by nothing yet. ``GATHER_PARAMETERS`` (ZeRO-3) is a :class:`CallRouter` around
the hooks, because hooks may read weights; inside random numbers and stages, because a stage that does not run a module
gathers nothing; and as a router it also runs where recomputation runs a block again. ``tests/module_adapter/
test_seams.py`` shows it.

**Taking off.** Everything is recorded with what was there before. :meth:`ModuleAdapter.remove` puts all of it back,
last things first, or refuses where the script has set something over it since.
"""

from hybridpp.module_adapter.adapter import ModuleAdapter
from hybridpp.module_adapter.call_router import CallHandler, CallRouter
from hybridpp.module_adapter.order import ORDER, AdapterLayer
from hybridpp.module_adapter.wrapper import Forward, forwards_inside, replace_forward

__all__ = [
    "ORDER",
    "AdapterLayer",
    "CallHandler",
    "CallRouter",
    "Forward",
    "ModuleAdapter",
    "forwards_inside",
    "replace_forward",
]
