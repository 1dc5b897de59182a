"""Hostile templates: each must end soon, with a TemplateError."""

from __future__ import annotations

END = "{% endfor %}"
ENDS = "{% endfor %}{% endfor %}"
LOOP = "{% for a in range(99999) %}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}"
TUPLES = "{% set n = namespace(s=(1,)) %}{% for i in range(60) %}{% set n.s = (n.s, n.s) %}{% endfor %}"
LISTS = "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}"
TWO_LISTS = (
    "{% set n = namespace(s=[1], t=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% se"
    "t n.t = [n.t, n.t] %}{% endfor %}"
)
SHORT = "y" * 5000
LONG = "y" * 50000

ENDLESS = {  # each loop has several turns within 1 << 18 units
    "range": "{% for i in range(10**12) %}" + END,
    "nested loops": "{% set r = range(100000) %}{% for a in r %}{% for b in r %}" + ENDS,
    "loops without steps": LOOP + "{% set x = range(999)|reject|list %}" + END,
    "loops that keep nothing": LOOP + "{% for b in range(99999) if false %}" + ENDS,
    "lengths of generators": LOOP + "{% for b in range(99999)|map('string') %}{{ loop.length * 0 }}" + ENDS,
    "macro calls itself": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "macros call each other twice": (
        "{% macro m(n) %}{% if n < 50 %}{{ m(n + 1) }}{{ m(n + 1) }}{% endif %}{% endmacro %}{{ m(0) }}"
    ),
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}" + END,
    "wide recursive loop": "{% for x in range(9) recursive %}{{ loop(range(99999)) }}" + END,
    "caller": (
        "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        "{% macro n(i) %}{% call m() %}{% if i %}{{ n(i - 1) }}{% endif %}{% endcall %}{% endmacro %}"
        "{{ n(58) }}"
    ),
    "sorts": LOOP + "{% set x = range(999)|sort %}" + END,
    "searches": "{% set s = 'a' * 30000 %}" + LOOP + "{% if 'b' in s %}{% endif %}" + END,
    "splats": "{% macro m() %}{{ varargs|length }}{% endmacro %}{% set l = range(999)|list %}"
    + LOOP
    + "{% set x = m(*l) %}"
    + END,
    "tests": LOOP + "{% set x = range(999)|select('odd')|list %}" + END,
    "letters": "{% set s = 'a' * 30000 %}" + LOOP + "{% set x = s.isalpha() %}" + END,
    "copies of a dictionary": LOOP
    + "{% set d = dict(messages[0].table) %}{% for b in range(99999) %}{% set x = d.copy() %}"
    + ENDS,
    "cycler": "{% set c = cycler(1) %}" + LOOPS + "{% set x = c.next() %}" + ENDS,
}

HUGE = {
    "text times number": "{{ 'x' * 10**10 }}",
    "number times text": "{{ 10**10 * 'x' }}",
    "list times number": "{{ ([0] * 10**10)|length }}",
    "output": "{% for i in range(100000) %}{{ 'x' * 5000 }}" + END,
    "constants": LOOP + LOOP + SHORT + ENDS,
    "constants in a macro": ("{% macro m() %}" + LOOP + LONG + END + "{% endmacro %}{{ m()|length }}"),
    "set block": "{% set x %}" + LOOP + LONG + END + "{% endset %}",
    "doubling": "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}" + END,
    "doubling by ~": (
        "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}" + END
    ),
    "doubling a list": (
        "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}" + END
    ),
    "lists in lists, written": LISTS + "{{ n.s }}",
    "lists in lists, compared": TWO_LISTS + "{{ n.s == n.t }}",
    "lists in lists, tested": TWO_LISTS + "{{ n.s is eq n.t }}",
    "lists in lists, as JSON": LISTS + "{{ n.s|tojson }}",
    "lists in lists, formatted": LISTS + "{{ '{}'.format(n.s) }}",
    "lists in lists, by %": LISTS + "{{ '%5s' % n.s }}",
    "lists in lists, as an index": TUPLES + "{{ {}[n.s] }}",
    "lists in lists, as a key": TUPLES + "{{ {n.s: 1} }}",
    "lists in lists, as a key of get": TUPLES + "{{ {}.get(n.s) }}",
    "lists in lists, as a key of dict": TUPLES + "{{ dict([(n.s, 1)]) }}",
    "lists in lists, unique": TUPLES + "{{ [n.s, n.s]|unique|list }}",
    "lists in lists, searched": TWO_LISTS + "{{ n.s.index(n.t) }}",
    "lists in lists, in": TWO_LISTS + "{{ n.t in [n.s] }}",
    "lists in lists, in a cycle": TWO_LISTS + "{% for i in [n.s, n.t] %}{{ loop.changed(i) }}" + END,
    "deep": "{% set n = namespace(s=()) %}{% for a in range(9999) %}"
    + "{% set n.s = (n.s,) %}"
    + END
    + "{{ {n.s: 1} }}",
    "deep, compared": "{% set n = namespace(s=[], t=[]) %}{% for a in range(9999) %}"
    + "{% set n.s = [n.s] %}{% set n.t = [n.t] %}"
    + END
    + "{{ n.s == n.t }}",
    "a namespace in itself": "{% set n = namespace() %}{% set n.n = n %}{{ n }}",
    "power": "{{ 10 ** 10 ** 10 }}",
    "power of floats": "{{ 10.0 ** 400 }}",
    "product of numbers": (
        "{% set n = namespace(i=10) %}{% for i in range(90) %}{% set n.i = n.i * n.i %}" + END
    ),
    "join": "{{ range(100000)|join('x' * 1000) }}",
    "join method": "{{ ('x' * 1000).join(range(99999)|map('string')) }}",
    "replace": "{{ ('x' * 100000)|replace('x', 'y' * 100000) }}",
    "replace method": "{{ ('x' * 100000).replace('', 'y' * 100000) }}",
    "center": "{{ 'x'|center(10**10) }}",
    "center method": "{{ 'x'.center(10**10) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "zfill": "{{ 'x'.zfill(10**10) }}",
    "tabs": "{{ '\t'.expandtabs(10**10) }}",
    "format": "{{ '{:>10000000000}'.format('x') }}",
    "format in format": "{{ '{:{}}'.format('x', 10**10) }}",
    "format_map": "{{ '{x:10000000000}'.format_map({'x': 1}) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**10, 1) }}",
    "percent precision": "{{ '%.1000000000f' % 1 }}",
    "percent by name": "{{ '%(a(b))10000000000d' % {'a(b)': 1} }}",
    "percent filter": "{{ '%10000000000d'|format(1) }}",
    "percent by a test": "{{ '%10000000000d' is divisibleby 3 }}",
    "even": "{{ '%10000000000d' is even }}",
    "indent": "{{ ('\n' * 100000)|indent(100000) }}",
    "indent by text": "{{ ('\n' * 100000)|indent('x' * 100000) }}",
    "indent JSON": "{{ [1]|tojson(indent=10**9) }}",
    "indent JSON by text": "{{ [1]|tojson(indent='x' * 100000) }}",
    "batch": "{{ [1]|batch(10**10, 0)|list }}",
    "slice": "{{ [1]|slice(10**10)|list }}",
    "round": "{{ 5|round(-10**9) }}",
    "round up": "{{ 5.5|round(10**9, 'ceil') }}",
    "bytes of a number": "{{ (1).to_bytes(10**10, 'big') }}",
    "encode": "{{ 'x'.encode() }}",
    "translate": "{{ 'x'.translate({120: 'y'}) }}",
    "time": "{{ strftime_now('%01000000000d') }}",
    "long time": "{{ strftime_now('%c' * 100000) }}",
    "sum of lists": "{{ ([range(9999)|list] * 9999)|sum(start=[]) }}",
    "slices": "{% set l = range(100000)|list %}{% set n = namespace(l=[]) %}"
    + LOOP
    + "{% set n.l = [n.l, l[1:]] %}"
    + END,
    "splits": "{% set s = ' a' * 1000000 %}{% set n = namespace(l=[]) %}"
    + LOOP
    + "{% set n.l = [n.l, s.split()] %}"
    + END,
    **{
        f"{call} of a negative width": "{% set x = " + call + " %}{{ 'x' * 10**9 }}"
        for call in (
            *(
                "'x'.ljust(-(10**18))",
                "'x'.rjust(-(10**18))",
                "'x'.center(-(10**18))",
                "'x'.zfill(-(10**18))",
            ),
            *(
                "'x'.ljust(width=-(10**18))",
                "'\t'.expandtabs(-(10**18))",
                "'\t'.expandtabs(tabsize=-(10**18))",
            ),
            *("[1]|batch(-(10**9))|list", "[1]|slice(-(10**9))|list", "'x'|center(-(10**18))"),
        )
    },
    **{
        f"{call} of a long piece": "{{ ('a' * 300000)" + call + "('ab' + 'a' * 150000) }}"
        for call in (
            *(".rfind", ".rindex", ".rsplit", ".rpartition", ".find", ".index", ".split", ".partition"),
            *(".count", ".replace", "|replace"),
        )
    },
    "in with a long piece": "{{ ('ab' + 'a' * 150000) in 'a' * 300000 }}",
    "is in with a long piece": "{{ ('ab' + 'a' * 150000) is in('a' * 300000) }}",
    "strip": "{{ ('a' * 400000).strip('b' * 300000 + 'a') }}",
    "strip from the end": "{{ ('a' * 400000).rstrip(chars='b' * 300000 + 'a') }}",
    "replace by names": "{{ ('x' * 100000).replace(old='x', new='y' * 100000) }}",
    "join by a name": "{{ ('x' * 1000).join(iterable=range(2000)|map('string')) }}",
    "lists in lists, in an error": LISTS + "{{ ({}[n.s]).x }}",
    "lists in lists, called": LISTS + "{{ n.s() }}",
    "lists in lists, as separators": LISTS + "{{ 1|tojson(separators=(n.s, ':')) }}",
    "lists in lists, as a method": TUPLES + "{{ 1|round(0, n.s) }}",
    "lists in lists, as a filter": TUPLES + "{{ [1]|map(n.s)|list }}",
    "lists in lists, as a test": TUPLES + "{{ [1]|select(n.s)|list }}",
    "lists in lists, as a test of attributes": TUPLES + "{{ [1]|rejectattr(0, n.s)|list }}",
    "sort by many keys": "{{ [{'a': 'x' * 300000}]|sort(attribute='a' + ',a' * 1000) }}",
    "sort by many keys as they are": "{{ [{'a': 'x'}, {'a': 'x'}]|sort(false, true, 'a' + ',a' * 50000) }}"
    * 99,
    "lists in lists, for a text": LISTS + "{{ messages[0].content.replace('H', n.s) }}",
    "text as arguments": "{{ cycler(*('x' * 300000)).current }}",
    "a user's text as arguments": "{{ cycler(*(messages[0].content * 150000)).current }}",
    "a list in itself": "{% set l = [] %}{% set x = l.append(l) %}{{ l == [l] }}{{ l }}",
    "a list in itself twice": "{% set l = [] %}{% set x = [l.append(l), l.append(l)] %}{{ l|tojson }}",
    "a list that grows": "{% set l = [1] %}{% for x in l %}{% set x = l.append(x) %}" + END,
    "copies": "{% set s = range(100000)|list %}{% set n = namespace(l=[]) %}"
    + LOOP
    + "{% set n.l = [n.l, s.copy()] %}"
    + END,
}

TRICKS = {
    "filters that syntax becomes": "{{ ['ab']|map(' slice', 0, 1, 1)|list }}",
    "tuples that collide": "{{ {(1, 2): 3} }}",
    "sets of keys": "{{ messages[0].keys() - [] }}",
    "class": "{{ ''.__class__ }}",
    "mro": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "item": "{{ ''['__class__'] }}",
    "attr": "{{ ''|attr('__class__') }}",
    "map": "{{ ['']|map(attribute='__class__')|list }}",
    "selectattr": "{{ ['']|selectattr('__class__')|list }}",
    "sort": "{{ ['', 'a']|sort(attribute='__class__') }}",
    "groupby": "{{ ['']|groupby('__class__') }}",
    "cycler": "{{ cycler.__init__.__globals__ }}",
    "cycler instance": "{{ cycler('a').__init__.__globals__['os'] }}",
    "joiner": "{{ joiner.__init__.__globals__.os.popen('id').read() }}",
    "namespace": "{{ namespace.__init__.__globals__ }}",
    "namespace internals": "{{ namespace(a=1)._Namespace__attrs }}",
    "namespace item": "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "namespace by name": "{{ namespace(**{'__call__': 1}) }}",
    "lipsum": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "self": "{{ self.__init__.__globals__ }}",
    "range": "{{ range.__class__ }}",
    "format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "format item": "{{ '{0[__class__]}'.format('') }}",
    "format by name": "{{ '{x.__class__}'.format(x='') }}",
    "format_map": "{{ '{x.__class__}'.format_map({'x': ''}) }}",
    "format by map": "{{ ['{0.__class__}']|map('format', '')|first is string and ''.__class__ }}",
    "format of a function": "{{ '{0.__globals__}'.format(raise_exception) }}",
    "macro": "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "macro of another": "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "caller": "{% macro m() %}{{ caller.__class__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "loop": "{% for x in [1] %}{{ loop._iterable.__class__ }}" + END,
    "loop class": "{% for x in [1] %}{{ loop.__class__.__init__.__globals__ }}" + END,
    "generator": "{{ (['a']|batch(1)).gi_frame.f_globals }}",
    "insert": "{{ [].insert(0, 1) }}",
    "extend": "{{ messages.extend([1]) }}",
    "undefined": "{{ nothing.__class__ }}",
    "undefined's class": "{{ nothing.__init__.__globals__ }}",
    "function": "{{ raise_exception.__globals__ }}",
    "function's run": "{{ raise_exception._run('x') }}",
    "function's function": "{{ raise_exception.func.__globals__ }}",
    "function's arguments": "{{ range.args[0] }}",
    "dict": "{{ dict.fromkeys([1]) }}",
    "update": "{{ {}.update(a=1) }}",
    "change a message": "{{ messages[0].update(role='system') }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os }}",
    "from import": "{% from 'os' import popen %}{{ popen }}",
    "extends": "{% extends 'x' %}",
    "block": "{% block x %}{% endblock %}",
    "autoescape": "{% autoescape true %}{{ '<' }}{% endautoescape %}",
    "do": "{% do messages.append(1) %}",
    "debug": "{% debug %}",
    "xmlattr": "{{ {'a': 1}|xmlattr }}",
    "environment": "{{ environment.getattr('', '__class__') }}",
    "context": "{{ context.environment.__class__ }}",
    "a function in the output": "{{ raise_exception }}",
    "a macro in the output": "{% macro m() %}{% endmacro %}{{ m }}",
    "a loop in the output": "{% for x in [1] %}{{ loop }}" + END,
}

BROKEN = {
    "unclosed": "{% for m in messages %}",
    "unknown tag": "{% jump %}",
    "unknown filter": "{{ messages|nonsense }}",
    "unknown test": "{{ messages is nonsense }}",
    "deep expression": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "long expression": "{{ 1" + " + 1" * 9000 + " }}",
    "long attribute": "{{ messages" + ".a" * 9000 + " }}",
    "deep blocks": "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "many loops": "{% for x in [1] %}" * 30 + "{% endfor %}" * 30,
    "long number": "{{ " + "9" * 5000 + " }}",
    "filter of filters": "{{ ''" + "|upper" * 9000 + " }}",
    "division": "{{ 1 / 0 }}",
    "addition": "{{ 1 + 'a' }}",
    "undefined": "{{ messages.nothing.more }}",
    "not iterable": "{% for x in 5 %}{% endfor %}",
    "its own": "{{ raise_exception('I want a system message') }}",
}
