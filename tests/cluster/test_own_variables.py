from hybridpp.cluster.own_variables import OwnVariables


def test_what_the_user_sets_before_or_after_stays():
    environment = {"BEFORE": "user's"}
    own = OwnVariables(environment)
    assert [own.set(name, "own") for name in ("BEFORE", "AFTER", "OWN")] == ["user's", "own", "own"]
    environment["AFTER"] = "user's"
    assert [own.has(name) for name in ("BEFORE", "AFTER", "OWN", "OTHER")] == [False, False, True, False]
    own.drop()
    assert environment == {"BEFORE": "user's", "AFTER": "user's"}
    assert not own.has("OWN")


def test_a_later_value_takes_the_place_of_ones_own():
    environment = {}
    own = OwnVariables(environment)
    own.set("OWN", "first"), own.set("OWN", "second")
    assert environment == {"OWN": "second"}
    own.drop(), own.drop()
    assert environment == {}
